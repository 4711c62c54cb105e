"""The attention study's statistics on made-up attention, its files, and what it refuses."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.cli.main import main
from kvatlas.connectors import attention_scores
from kvatlas.core.policy.attention import AttentionScores
from kvatlas.errors import ConfigError
from kvatlas.validate import attention_study as study
from kvatlas.validate.attention_contexts import Context, contexts
from kvatlas.workload.attention_scores import measured_scores
from kvatlas.workload.models import known_models

KEPT = Path(__file__).parents[1] / "fixtures" / "validated" / "attention-smollm2.json"
LOSS = study.Loss("none", 0.0, 0, 1.0, 4, 0.0, 0.0)
BLOCKS = 30  # 4 of them the sink, 8 the recent window


def answer(name: str, hot: int, *, moves: int = 0, about: tuple[int, ...] = ()) -> study.Answer:
    """Two layers, 40 steps: half of all on the first block, a tenth on the hot one, the rest even.

    The hot one is another one every step where it ``moves``.
    """
    steps = []
    for step in range(40):
        masses = [0.4 / BLOCKS] * BLOCKS
        masses[0] += 0.5
        masses[4 + (hot - 4 + moves * step) % 18] += 0.1
        steps.append([masses, masses])
    return study.Answer(
        id=f"{name}#{hot}",
        context=name,
        kind="made up",
        context_tokens=16 * BLOCKS,
        question_tokens=32,
        about=list(about),
        text="",
        mass=steps,
        edges=[[[0.5, 0.55, 0.2], [0.3, 0.35, 0.4]]] * 2,
        needed=[[0.1, 0.2, 0.3]] * 2,
        noise=[0.9, 0.8],
        losses=[LOSS],
        seconds=1.0,
    )


def context(name: str) -> Context:
    return Context(name, "made up", (), ())


@pytest.mark.parametrize(
    ("masses", "share", "expected"),
    [
        ([1, 1, 1, 1], 0.8, 1.0),
        ([1, 1, 1, 1], 0.75, 0.75),
        ([9, 1, 0, 0], 0.9, 0.25),
        ([0, 1, 9, 0], 0.91, 0.5),
        ([0, 0], 0.8, 0.0),
        ([0.1] * 10, 0.3, 0.3),
    ],
)
def test_how_many_blocks_hold_so_much(masses: list[float], share: float, expected: float) -> None:
    assert study.holding(masses, share) == expected


def test_hot_blocks_and_what_they_catch() -> None:
    masses = [5.0, 1.0, 4.0, 0.0, 0, 0, 0, 0, 0, 0]
    assert study.hot(masses) == {0}
    assert study.hot(masses, 0.2) == {0, 2}
    assert study.hot([1.0, 2.0], 0.0) == {1}, "at least one"
    assert study.caught({0, 2}, masses) == 0.9
    assert study.caught({0}, [0.0, 0.0]) == 0.0
    assert study.common([9, 1, 0], [0, 1, 9]) == 0.0


def test_ranks_follow_order_not_size() -> None:
    rising = [1.0, 2.0, 30.0, 400.0]
    assert study.rank_correlation(rising, [0.1, 0.2, 0.3, 0.4]) == pytest.approx(1.0)
    assert study.rank_correlation(rising, rising[::-1]) == pytest.approx(-1.0)
    assert study.rank_correlation(rising, [1.0] * 4) == 0.0
    # Ties share their mean rank: 0, 1.5, 1.5, 3 against 0, 1, 2, 3.
    assert study.rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)


def test_rows_that_grow_and_blocks_that_merge() -> None:
    assert study.mean([[2.0], [4.0, 6.0]]) == [3.0, 3.0]
    assert study.wide([1, 2, 3, 4, 5], 4) == [10, 5]


def test_what_stays_is_predicted_and_what_moves_is_not() -> None:
    stays, moves = answer("a", 10), answer("a", 10, moves=1)
    over = [study.middle(stays)] * 2
    assert over[0] == range(4, 22)
    for made, low, high in ((stays, 0.3, 1.0), (moves, 0.0, 0.11)):
        steps = [study._cut(step[0], over[0]) for step in made.mass]
        found, best = study.stable(steps, 8)
        assert low <= found <= high
        assert best > 0.3
    assert study.stable([[1.0]], 1) == (0.0, 0.0), "there is nothing to predict"


def test_one_answer_told() -> None:
    told = study.told(answer("a", 10, about=(10, 99)), [study.layers(answer("a", 12).mass)], "d")
    assert (told.first, told.sink, told.recent) == pytest.approx((0.4, 0.45, 0.3))
    assert told.middle == pytest.approx(0.25)
    assert told.even_sink == pytest.approx(64 / (480 + 32 + 20))
    assert told.holding[0] == pytest.approx(15 / 30)  # .513, .113, then .0133 each
    assert told.tokens_needed == pytest.approx((0.1, 0.2, 0.3))
    assert told.noise == pytest.approx(0.85)
    assert told.about_own is not None
    assert told.about_other is not None
    assert told.about_own > 5
    assert told.about_other < 1
    assert sum(told.profile) == pytest.approx(1.0)
    assert [s.past_steps for s in told.stable] == [1, 8, 32]


def test_questions_that_look_elsewhere_have_nothing_in_common() -> None:
    same = study.pair(answer("a", 10), answer("a", 10))
    assert (same.common, same.common_by_layer, same.rank) == pytest.approx((1, 1, 1))
    other = study.pair(answer("a", 10), answer("a", 12))
    assert other.common == 0.5, "the second hottest are all alike: the first of them is taken"
    assert other.halves_common == 1.0
    assert other.rank < 0.1 < other.halves_rank


def test_only_questions_on_one_context_are_compared() -> None:
    answers = [answer("a", 10, about=(10,)), answer("a", 12), answer("b", 10, about=(11,))]
    told, pairs = study.study(answers, [context("a"), context("b")])
    assert [p.context for p in pairs] == ["a"]
    assert told[0].about_other is not None
    assert told[2].about_other is None
    assert told[0].digest == told[1].digest != told[2].digest


def test_a_context_without_a_middle_is_refused() -> None:
    short = msgspec.structs.replace(answer("a", 4), context_tokens=160)
    with pytest.raises(ConfigError, match="no middle"):
        study.told(short, [], "d")


def made_study(*answers: study.Answer) -> study.Study:
    told, pairs = study.study(answers, [context(a.context) for a in answers])
    fields = {"model": "m", "weights": "w", "transformers": "1", "torch": "2", "device": "cpu"}
    return study.Study(
        **fields,
        seed=1,
        date="2026-01-01",
        tokens=41,
        answers=tuple(told),
        pairs=tuple(pairs),
    )


def test_scores_are_by_place_in_the_prompt() -> None:
    scores = study.scores(made_study(answer("a", 13), answer("b", 13)))
    even = 4 * 0.4 / BLOCKS
    assert scores.block_tokens == 64
    assert scores.from_start == pytest.approx((even + 0.5, even, even, even + 0.1), abs=1e-5)
    assert scores.middle == pytest.approx(even, abs=1e-5)
    assert scores.last == pytest.approx(even / 2, abs=1e-5), "made up only half of it"
    assert scores.speaks_for("m") == ""
    assert AttentionScores.decode(msgspec.json.encode(scores), "x") == scores


def test_short_contexts_have_no_scores() -> None:
    short = msgspec.structs.replace(made_study(answer("a", 13)).answers[0], context_tokens=256)
    with pytest.raises(ConfigError, match="in its middle"):
        study.scores(msgspec.structs.replace(made_study(answer("a", 13)), answers=(short,)))


# -- what is given up, and what a question is about ------------------------------------------------


def test_orders_know_what_they_may_know() -> None:
    means = [[0.0, 3.0, 1.0, 2.0, 9.0], [0.0, 1.0, 2.0, 3.0, 9.0]]
    found = attention_scores.orders(means, 0, [1, 2, 3], seed=1)
    assert found["before"] == [1, 2, 3], "by the other question's answer"
    assert found["hindsight"] == [2, 3, 1]
    assert found["hottest"] == [1, 3, 2]
    assert found["oldest"] == [1, 2, 3]
    assert sorted(found["random"]) == [1, 2, 3]
    assert found == attention_scores.orders(means, 0, [1, 2, 3], seed=1)
    assert "before" not in attention_scores.orders(means[:1], 0, [1, 2, 3], seed=1)


def test_words_are_found_in_their_blocks() -> None:
    text = "one two three four five six seven"
    offsets = [(m.start(), m.end()) for m in re.finditer(r"\S+", text)]
    assert attention_scores.about(2, text, offsets, "four five") == [1, 2]
    assert attention_scores.about(2, text, offsets, "eight") == []
    assert attention_scores.about(2, text, offsets, "") == []
    assert attention_scores.about(2, text, offsets[:3], "six") == [], "cut off"


# -- scores for blocks of another size ------------------------------------------------------------


def test_larger_blocks_get_what_is_in_them() -> None:
    scores = AttentionScores("kvatlas.attention-scores.1", "m", "attention", True, "s", 64)
    scores = msgspec.structs.replace(scores, from_start=(8.0, 4.0, 2.0), last=3.0, middle=1.0)
    assert scores.for_blocks(64) is scores
    larger = scores.for_blocks(128)
    assert (larger.from_start, larger.last, larger.middle) == ((12.0, 3.0), 4.0, 2.0)
    smaller = scores.for_blocks(32)
    assert smaller.from_start == (4.0, 4.0, 2.0, 2.0, 1.0, 1.0)
    assert (smaller.last, smaller.middle) == (1.5, 0.5)
    odd = scores.for_blocks(96)
    assert (odd.from_start, odd.last, odd.middle) == ((10.0, 4.0), 3.5, 1.5)
    vast = scores.for_blocks(64 << 30)
    assert (vast.from_start, vast.middle) == ((14.0 + (1 << 30) - 3,), 1 << 30)


@given(
    st.lists(st.floats(0, 100), max_size=9),
    st.floats(0, 9),
    st.integers(1, 300),
    st.integers(1, 300),
)
def test_no_attention_is_lost_or_made(
    starts: list[float], middle: float, measured: int, wanted: int
) -> None:
    scores = AttentionScores("kvatlas.attention-scores.1", "m", "attention", True, "s", measured)
    scores = msgspec.structs.replace(scores, from_start=tuple(starts), middle=middle)
    other = scores.for_blocks(wanted)
    covered = len(other.from_start) * wanted / measured
    whole = sum(starts) + middle * (covered - len(starts))
    assert sum(other.from_start) == pytest.approx(whole, abs=1e-6)
    assert other.middle == pytest.approx(middle * wanted / measured)


def test_what_no_blocks_of_another_size_can_have() -> None:
    scores = AttentionScores("kvatlas.attention-scores.1", "m", "attention", True, "s", 64)
    with pytest.raises(ConfigError, match="single blocks of 64 tokens, these have 128"):
        msgspec.structs.replace(scores, by_key={"1": 2.0}).for_blocks(128)
    many = msgspec.structs.replace(scores, block_tokens=1 << 16, from_start=(1.0,) * 17)
    with pytest.raises(ConfigError, match="use larger blocks"):
        many.for_blocks(1)


# -- what is kept ---------------------------------------------------------------------------------


def test_the_study_that_is_kept_is_consistent() -> None:
    kept = study.Study.decode(KEPT.read_bytes(), KEPT.name)
    assert len(kept.answers) >= 8
    assert {"document", "code", "chat", "code chat"} == {a.kind for a in kept.answers}
    for each in kept.answers:
        assert each.sink + each.middle + each.recent == pytest.approx(1.0)
        assert 0 < each.first <= each.sink
        assert sum(each.profile) == pytest.approx(1.0, abs=1e-3)
        for shares in (each.holding, each.holding_by_layer, each.holding_wide, each.tokens_needed):
            assert all(0 < a <= b <= 1 for a, b in itertools.pairwise(shares))
        assert all(s.chance < s.caught <= 1 and s.caught_by_layer <= 1 for s in each.stable)
        assert len(each.by_layer) == 30
        unchanged = [x for x in each.losses if x.order == "none"]
        assert [(x.agreement, x.kl_nats) for x in unchanged] == [(1.0, 0.0)]
        held = each.context_tokens // study.BLOCK_TOKENS
        for loss in each.losses:
            assert loss.blocks == round(loss.share * held)
            assert (loss.agreement == 1.0) == (loss.first_other == kept.tokens)


def test_the_scores_that_ship_are_those_of_the_study() -> None:
    kept = study.Study.decode(KEPT.read_bytes(), KEPT.name)
    assert measured_scores(kept.model.upper()) == study.scores(kept)
    assert kept.model.lower() in known_models()
    assert measured_scores("deepseek-v4-flash") is None
    assert measured_scores("../scores/smollm2-135m-instruct") is None


def test_strategies_are_compared_by_them_and_v4_stays_unknown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    prompts = [[1, 2, 3, 4], [5, 6, 7], [1, 2, 3, 4, 8], [9, 10]]
    with trace.open("wb") as file:
        for n, ids in enumerate(prompts):
            line = {"timestamp": 1000 * n, "input_length": 512 * len(ids), "output_length": 5}
            file.write(msgspec.json.encode(line | {"hash_ids": ids}) + b"\n")
    notes = {}
    for model in ("smollm2-135m-instruct", "deepseek-v4-flash"):
        # All that is distinct fits but two blocks: the middle of the oldest prompt goes.
        options = ["--capacity", "8", "--model", model, "--json"]
        assert main(["trace", "compare", str(trace), *options]) == 0
        rows = msgspec.json.decode(capsys.readouterr().out)["rows"]
        (row,) = [row for row in rows if row["policy"] == "attention"]
        notes[model] = (row["note"], row["token_hit_rate"])
    assert notes["smollm2-135m-instruct"] == ("", 4 / 14)
    assert notes["deepseek-v4-flash"] == ("not known: no statistics of deepseek-v4-flash", None)


def test_an_earlier_run_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["study", "attention", "--show", str(KEPT), "--scores", str(tmp_path / "s")]) == 0
    shown = capsys.readouterr().out
    assert "SmolLM2-135M-Instruct" in shown
    assert "32 steps before" in shown
    assert "…" not in shown, "a column that does not fit"
    assert AttentionScores.decode((tmp_path / "s").read_bytes(), "s").trained


# -- contexts, and what is refused ----------------------------------------------------------------


def test_texts_become_contexts_with_questions_about_parts(tmp_path: Path) -> None:
    page, code = tmp_path / "page.md", tmp_path / "code.py"
    page.write_text(
        "\n\n".join(f"## Part {n}\n\n{'Words that fill a line. ' * 6}" for n in range(30))
    )
    code.write_text("\n\n\n".join(f"def f{n}() -> int:\n    return {n} + {n}" for n in range(90)))
    chats = [tmp_path / "chat.md", tmp_path / "chat.py"]
    for chat, text in zip(chats, (page, code), strict=True):
        chat.write_text(text.read_text())
    made = contexts([page, code], chats)
    assert [c.kind for c in made] == ["document", "code", "chat", "code chat"]
    assert len({c.digest() for c in made}) == 4
    for each in made:
        said = "\n\n".join(m["content"] for m in each.messages)
        assert len(each.questions) == 2
        assert all(q.about and q.about in said for q in each.questions)
        assert each.messages[0]["role"] == "user"
    with pytest.raises(ConfigError, match=r"page\.md: another text has this name"):
        contexts([page], [page])


BAD: list[tuple[list[str], str]] = [
    (["--tokens", "7"], "--tokens 7"),
    (["--context-tokens", "100000"], "--context-tokens 100000"),
    (["--seed", "-1"], "--seed -1"),
    (["--text", "nowhere.md"], r"nowhere\.md: no text"),
    (["--text", "SHORT"], "too short"),
    (["--text", "BINARY"], "no text that can be read"),
    (["--text", "PAGE"] * 33, "33 texts"),
    (["--show", str(KEPT), "--out", "nowhere/at/all.json"], "cannot be written"),
    (["--show", "nowhere.json"], "cannot be read"),
    (["--show", "BINARY"], "no kvatlas.attention-study.1"),
    (["--show", "SHORT"], "no kvatlas.attention-study.1"),
    (["--venv", "nowhere"], "nowhere has no vllm"),
    (["--out", "nowhere/at/all.json"], "there is no nowhere/at"),
]


@pytest.mark.parametrize(("options", "told"), BAD)
def test_bad_input_is_one_line(
    options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "SHORT").write_text("{}")
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe\x00" * 999)
    (tmp_path / "PAGE").write_text("Words. " * 400)
    given = [str(tmp_path / o) if o.isupper() else o for o in options]
    text = [] if "--text" in given else ["--text", str(tmp_path / "PAGE")]
    assert main(["study", "attention", *given, *text]) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert re.search(told, complaint), complaint


def test_a_study_that_is_none() -> None:
    good: dict[str, Any] = msgspec.to_builtins(made_study(answer("a", 5)))
    told = good["answers"][0]
    wrong: tuple[dict[str, Any], ...] = (
        {"format": "other"},
        {"answers": 3},
        {"answers": []},
        {"answers": [told | {"holding": [0.5]}]},
        {"surprise": 1},
        {"seed": "x"},
    )
    for changed in wrong:
        with pytest.raises(ConfigError, match=r"x: no kvatlas\.attention-study\.1"):
            study.Study.decode(msgspec.json.encode(good | changed), "x")
    for changed in ({"context_tokens": -40}, {"context_tokens": 1 << 40}, {"profile": []}):
        with pytest.raises(ConfigError, match="x: a#5: its profile"):
            study.Study.decode(msgspec.json.encode(good | {"answers": [told | changed]}), "x")
    assert msgspec.to_builtins(study.Study.decode(msgspec.json.encode(good), "x")) == good
