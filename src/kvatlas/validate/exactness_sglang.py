"""Answers of real SGLang servers, for `kvatlas.validate.exactness_tiers`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvatlas.connectors import seeded_model
from kvatlas.connectors.child import Child, free_ports
from kvatlas.connectors.sglang_cpu import SGLANG, SglangEngine, storage
from kvatlas.connectors.vllm_cpu import environment, python_of
from kvatlas.core.layout import Rule, round_up
from kvatlas.errors import ConfigError, EngineError
from kvatlas.service.http_client import HttpClient
from kvatlas.validate.exactness import DECODE_TOKENS, Answer, last_position
from kvatlas.validate.exactness_vllm import LOGPROBS, Subject
from kvatlas.workload.proofs import Runtime

_STORAGE = "storage"  # all that SGLang says of what lies behind its host pool
_ANSWER_S = 600.0
_READY_S = 300.0
_SOURCES = ("device", "host", _STORAGE)


class SglangAnswers:
    """A fresh server each time. It cuts prompts into steps of one page, so that a resume repeats
    the very sums of the reference."""

    def __init__(
        self,
        what: Subject,
        prompts: Mapping[int, list[int]],
        *,
        venv: Path,
        path: Sequence[Path],
        scratch: Path,
        settings: Mapping[str, float],
    ) -> None:
        """``prompts`` by their lengths; ``settings`` of our backend. Raises ConfigError for a model
        that SGLang does not run on a CPU, EngineError where its weights cannot be made."""
        if any(part.rule is Rule.WINDOW for part in what.layout.components):
            raise ConfigError(
                f"SGLang's CPU backend runs models with whole attention only, and {what.name} has"
                " windows: validate it on vLLM"
            )
        self._what = what
        self._prompts = prompts
        self._venv = venv
        self._path = path
        self._scratch = scratch
        self._settings = settings
        if what.made_up:
            self._make_weights()

    def tier(self, source: str, expected: str) -> str:
        """SGLang does not tell one tier from another: the agent does."""
        return expected if source == _STORAGE and expected else source

    def runtime(self) -> Runtime:
        """The version that is installed; of the processor SGLang says nothing."""
        return Runtime("sglang", SGLANG.partition("==")[2], "cpu")

    def answers(
        self, name: str, socket: Path | None, turns: int, settled: Callable[[int], object]
    ) -> dict[str, Answer]:
        """One of each prompt and turn, by ``name``-turn-length."""
        engine = self._engine(socket)
        engine.start()
        try:
            engine.wait_ready(_READY_S)
            return asyncio.run(self._all(engine.url, name, turns, settled))
        finally:
            engine.stop()

    async def _all(
        self, url: str, name: str, turns: int, settled: Callable[[int], object]
    ) -> dict[str, Answer]:
        client, found = HttpClient(), {}
        grid = self._what.layout.grid_tokens
        try:
            for turn in range(turns):
                if turn:  # it saves beside; what it has not handed over is lost in a flush
                    settled(sum(last_position(n, grid) // grid for n in self._prompts))
                    await _flush(client, url)
                for n, prompt in self._prompts.items():
                    id = f"{name}-{turn}-{n}"
                    found[id] = await _ask(client, url, id, prompt)
        finally:
            await client.close()
        return found

    def _engine(self, socket: Path | None) -> SglangEngine:
        grid = self._what.layout.grid_tokens
        needed = sum(round_up(n + DECODE_TOKENS, grid) + grid for n in self._prompts)
        args = ["--skip-tokenizer-init", "--chunked-prefill-size", str(grid)]
        if socket is not None:
            args += storage(socket, {**self._settings, "prefetch_threshold": grid})
        (port,) = free_ports(1)
        return SglangEngine(
            self._venv,
            self._what.folder,
            name="sglang",
            port=port,
            log=self._scratch / "sglang.log",
            model_name="validated",
            path=self._path,
            page_tokens=grid,
            pool_tokens=2 * needed,
            args=args,
        )

    def _make_weights(self) -> None:
        argv = [python_of(self._venv), seeded_model.__file__, str(self._what.folder)]
        log = self._scratch / "weights.log"
        child = Child("weights", argv, log=log, env=environment({}))
        child.start()
        try:
            if child.wait(_READY_S) != 0:
                raise EngineError(f"no weights could be made:\n{child.log_tail()}")
        finally:
            child.stop()


async def _flush(client: HttpClient, url: str) -> None:
    """Once all is over: an answer may be told before its batch is."""
    answer = await client.request("POST", f"{url}/flush_cache?timeout=60", timeout_s=_ANSWER_S)
    if answer.status != 200:
        raise EngineError(f"SGLang would not drop its cache: {answer.body[:200]!r}")


async def _ask(client: HttpClient, url: str, id: str, prompt: Sequence[int]) -> Answer:
    sampling = {"max_new_tokens": DECODE_TOKENS, "temperature": 0, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": prompt, "sampling_params": sampling}
    body |= {"return_logprob": True, "top_logprobs_num": LOGPROBS}
    told = await client.post_json(f"{url}/generate", body, timeout_s=_ANSWER_S)
    about: dict[str, Any] = told["meta_info"]
    details = about.get("cached_tokens_details") or {}
    return Answer(
        id,
        [token for _, token, *_ in about["output_token_logprobs"]],
        [
            [(token, logprob) for logprob, token, *_ in sorted(top, key=lambda one: one[1])]
            for top in about["output_top_logprobs"]
        ],
        about["cached_tokens"],
        about.get("e2e_latency", 0.0),
        {source: details[source] for source in _SOURCES if details.get(source)},
    )
