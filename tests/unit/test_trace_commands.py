"""``kvatlas trace``: figures, generating, converting, anonymising, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.cli.main import main
from kvatlas.errors import ConfigError
from kvatlas.workload.anonymise import anonymised, new_secret
from kvatlas.workload.families import generate
from kvatlas.workload.presets import FAMILIES
from kvatlas.workload.trace import Trace, TraceRequest, open_trace
from kvatlas.workload.trace_stats import stats
from kvatlas.workload.trace_write import write

KEY = b"a key of sixteen bytes"


@pytest.fixture
def chats() -> Trace:
    family = msgspec.structs.replace(FAMILIES["multi-turn"], requests=300)
    return generate(family, 1)


@pytest.fixture
def chats_file(chats: Trace, tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    write(path, chats)
    return path


def told(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["trace", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_stats_for_people_and_programs(
    chats: Trace, chats_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = json.loads(told(capsys, "stats", chats_file, "--json"))
    found = stats(chats)
    assert found is not None
    assert said["block_hit_rate"] == found.block_hit_rate
    assert said["token_hit_rate"] == found.token_hit_rate
    assert (said["format"], said["block_tokens"], said["requests"]) == ("mooncake", 16, 300)
    assert said["prompt_tokens"]["total"] == found.prompt_tokens.total
    text = told(capsys, "stats", chats_file)
    assert f"{found.unique_blocks:,}" in text
    assert f"{found.block_hit_rate:.4f} of blocks" in text
    few = json.loads(told(capsys, "stats", chats_file, "--json", "--requests", "7"))
    assert few["requests"] == 7


def test_generate_is_the_same_by_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"{name}.jsonl" for name in "abc"]
    for path, seed in zip(paths, ("1", "1", "2"), strict=True):
        said = told(capsys, "generate", "agent", path, "--requests", "200", "--seed", seed)
        assert said == f"200 requests, blocks of 16 tokens → {path}\n"
    one, same, other = (path.read_bytes() for path in paths)
    assert one == same != other
    family = msgspec.structs.replace(FAMILIES["agent"], requests=200, duration_s=120.0)
    written = list(open_trace(paths[0]))
    assert [(r.input_tokens, r.hash_ids, r.session) for r in written] == [
        (r.input_tokens, r.hash_ids, r.session) for r in generate(family, 1)
    ]


def test_generate_lists_what_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, "generate", "--list")
    assert "family  shared-prompt" in said
    assert "preset  seed-003" in said


def test_convert_keeps_the_requests(
    chats_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl.xz"
    told(capsys, "convert", chats_file, out, "--requests", "50")
    assert list(open_trace(out)) == list(open_trace(chats_file))[:50]


def test_logs_are_read_with_the_models_tokenizer(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = {"messages": [{"role": "user", "content": "hello there, how are you today? " * 9}]}
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"ts": n, "body": chat}) + "\n" for n in range(2)))
    arguments = ("stats", log, "--json", "--block-tokens", "8", "--tokenizer")
    for tokenizer in (model_dir, model_dir / "tokenizer.json"):
        said = json.loads(told(capsys, *arguments, tokenizer))
        assert said["format"] == "openai"
        assert said["token_hit_rate"] == 0.5


# -- anonymising ----------------------------------------------------------------------------------


def test_an_anonymised_trace_hits_as_before_and_tells_nothing(
    chats: Trace, chats_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    told(capsys, "anonymise", chats_file, out)
    before, after = stats(open_trace(chats_file)), stats(open_trace(out))
    assert before is not None
    assert after is not None
    same = (
        "requests", "block_hit_rate", "token_hit_rate", "unique_blocks", "lru", "prompt_tokens",
        "output_tokens", "hits_in_session", "peak_live_blocks", "sessions", "turns_per_session",
    )  # fmt: skip
    for name in same:
        assert getattr(before, name) == getattr(after, name), name
    hidden = list(open_trace(out))
    assert not {id for r in hidden for id in r.hash_ids} & {id for r in chats for id in r.hash_ids}
    assert not {r.session for r in hidden} & {r.session for r in chats}
    assert hidden[0].arrival_s == 0
    assert all(r.arrival_s == int(r.arrival_s) for r in hidden)


def test_without_the_key_nobody_gets_the_same_ids(chats: Trace) -> None:
    ids = [
        [r.hash_ids for r in anonymised(chats, secret)]
        for secret in (KEY, KEY, KEY + b"!", new_secret(), new_secret())
    ]
    assert ids[0] == ids[1]
    assert len({first[0] for first in (hashes for hashes in ids)}) == 4


@given(st.lists(st.floats(0, 1e6), min_size=1).map(sorted), st.sampled_from([0.0, 0.25, 1.0, 60.0]))
def test_times_start_at_0_and_keep_their_order(times: list[float], step_s: float) -> None:
    requests = [TraceRequest(n, at, 1, 1, (n,), think_s=at) for n, at in enumerate(times)]
    hidden = list(anonymised(requests, KEY, step_s))
    moved = [r.arrival_s for r in hidden]
    assert moved[0] == 0
    assert moved == sorted(moved)
    for before, after in zip(times, moved, strict=True):
        assert 0 <= before - times[0] - after <= step_s + 1e-9


def test_ids_of_two_tenants_are_not_the_same(chats: Trace) -> None:
    two = [TraceRequest(n, 0.0, 1, 1, (5,), scope=scope) for n, scope in enumerate("ab")]
    one, other = anonymised(two, KEY)
    assert one.hash_ids != other.hash_ids
    assert "a" not in (one.scope, other.scope)
    for step_s in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="in steps of"):
            list(anonymised(chats, KEY, step_s))


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["stats", "absent.jsonl"], "absent.jsonl: cannot be read: No such file"),
        (["stats", "."], "cannot be read: Is a directory"),
        (["stats", "empty.jsonl"], "no requests in it"),
        (["stats", "chats.jsonl", "--requests", "0"], "--requests 0"),
        (["stats", "chats.jsonl", "--block-tokens", "0"], "block_tokens 0"),
        (["stats", "chats.jsonl", "--block-tokens", "512"], "chats.jsonl:1: "),
        (["stats", "chats.jsonl", "--format", "azure"], "chats.jsonl:1: the header"),
        (["stats", "chats.jsonl", "--format", "openai"], "--tokenizer"),
        (["stats", "cut.jsonl.xz"], "cut.jsonl.xz:1: cannot be read on"),
        (["convert", "chats.jsonl", "chats.jsonl"], "exists already"),
        (["anonymise", "chats.jsonl", "chats.jsonl"], "exists already"),
        (["anonymise", "chats.jsonl", "o", "--key-file", "empty.jsonl"], "16 bytes or more"),
        (["anonymise", "chats.jsonl", "o", "--key-file", "absent"], "absent: cannot be read"),
        (["anonymise", "chats.jsonl", "o", "--time-step-s", "nan"], "in steps of nan"),
        (["generate"], "NAME and OUT are needed"),
        (["generate", "nonsense", "o"], "no preset and no family: use one of random"),
        (["generate", "agent", "o", "--requests", "0"], "requests 0"),
        (["generate", "agent", "o", "--block-tokens", "0"], "block_tokens 0"),
        (["generate", "agent", "o", "--duration-s", "-1"], "duration_s -1"),
        (["generate", "agent", "chats.jsonl", "--requests", "9"], "exists already"),
    ],
)
def test_faults_are_one_line_and_status_2(
    arguments: list[str],
    reason: str,
    chats_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tmp_path = chats_file.parent
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "cut.jsonl.xz").write_bytes(b"\xfd7zXZ\x00\x00\x04")
    before = chats_file.read_bytes()
    assert main(["trace", *arguments]) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert said.count("\n") == 1
    assert chats_file.read_bytes() == before
    assert not (tmp_path / "o").exists()


def test_a_public_trace_is_anonymised_without_loss(
    shared_file: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = shared_file("traces/miniswe_bs64.jsonl"), tmp_path / "o.jsonl"
    told(capsys, "anonymise", path, out)
    before, after = stats(open_trace(path)), stats(open_trace(out))
    assert before is not None
    assert after is not None
    assert (before.lru, before.token_hit_rate) == (after.lru, after.token_hit_rate)
