"""A real SGLang server on a real agent: what its HiCache lets go of is found again, on flush, after
a restart of the server and of the agent, and no answer is ever another."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from real_engines import READY_S, post, sglang_engine

from kvatlas.connectors.sglang_cpu import SglangEngine, storage
from kvatlas.validate.exactness_tiers import AgentProcess, _flip_arena, _flip_disk

pytestmark = pytest.mark.engine

PROMPT = [(i * 37 + i // 7) % 250 + 5 for i in range(600)]
HIT = 592  # whole pages of 16 tokens, and one token must be computed


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    made = AgentProcess(tmp_path)
    made.start()
    yield made
    made.end()


@contextmanager
def server(tmp_path: Path, agent: AgentProcess) -> Iterator[SglangEngine]:
    """One that is up. An answer counts that comes late on a busy machine."""
    late = {"answer_s": 60, "load_deadline_s": 60}
    engine = sglang_engine(tmp_path, pool_tokens=8192, args=storage(agent.socket, late))
    engine.start()
    try:
        engine.wait_ready(READY_S)
        yield engine
    finally:
        engine.stop()


def answer(url: str, prompt: list[int]) -> tuple[Any, dict[str, int]]:
    """Tokens with their logprobs, and where SGLang says that cached ones came from."""
    sampling = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    told = post(url, "/generate", body)
    found = told["meta_info"].get("cached_tokens_details") or {}
    sources = {name: found[name] for name in ("device", "host", "storage") if found.get(name)}
    return [(t, round(p, 4)) for p, t, *_ in told["meta_info"]["output_token_logprobs"]], sources


def flush(url: str) -> None:
    """An answer may be told before its batch is over: SGLang waits for that when asked to."""
    post(url, "/flush_cache?timeout=60", {})


def settled(agent: AgentProcess, units: int) -> dict[str, Any]:
    """The agent has all of it, on its disk too."""

    def there(status: dict[str, Any]) -> bool:
        tiers = status["tiers"].values()
        return not status["busy"] and all(tier["units"] >= units for tier in tiers)

    return agent.wait(there)


def test_a_prompt_outlives_the_cache_the_server_and_the_agent(
    agent: AgentProcess, tmp_path: Path
) -> None:
    with server(tmp_path, agent) as engine:
        first, sources = answer(engine.url, PROMPT)
        assert sources == {}
        assert answer(engine.url, PROMPT) == (first, {"device": HIT})
        settled(agent, HIT // 16)

        flush(engine.url)
        assert answer(engine.url, PROMPT) == (first, {"storage": HIT})
        # Another prompt shares half of it: it resumes there.
        other = PROMPT[:320] + PROMPT[400:500]
        alone, sources = answer(engine.url, other)
        assert sources == {"device": 320}
        settled(agent, HIT // 16)

        agent.end(signal.SIGKILL)
        flush(engine.url)
        assert answer(engine.url, PROMPT) == (first, {}), "nobody is there: it is computed"
        agent.start()
        agent.wait(lambda status: _asked(engine.url, other) and bool(status["engines"]))
        flush(engine.url)
        assert answer(engine.url, PROMPT) == (first, {"storage": HIT})
        status = agent.wait(lambda status: not status["busy"])
        assert status["loaded_tokens"]["disk"] >= HIT, "not from what the disk kept"

    with server(tmp_path, agent) as engine:
        assert answer(engine.url, PROMPT) == (first, {"storage": HIT})
        flush(engine.url)
        agent.wait(lambda status: not status["busy"])
        _flip_arena(agent)
        _flip_disk(agent)
        assert answer(engine.url, PROMPT)[0] == first, "wrong bytes were used"
        assert agent.wait(lambda status: not status["busy"])["counts"]["damaged"]
        flush(engine.url)
        assert answer(engine.url, other)[0] == alone


def _asked(url: str, prompt: list[int]) -> bool:
    """Each time of the storage, which an engine that has the prompt itself does not ask."""
    flush(url)
    answer(url, prompt)
    return True
