"""Test-only: lets vLLM 0.32's MooncakeConnector run on a CPU. Put this directory on PYTHONPATH.

Its worker asks torch for the number of its accelerator, and there is none. It only selects that
device, which does nothing on a CPU.
"""

import torch

torch.accelerator.current_device_index = lambda: 0
