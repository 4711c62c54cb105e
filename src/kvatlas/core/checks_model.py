"""Checks of engines that serve one model, beside each other: they must not differ unseen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvatlas.core.check_facts import EngineFacts
from kvatlas.core.checks_engine import differing, said
from kvatlas.core.compat import layout_differences
from kvatlas.core.findings import Finding, not_applicable, not_shown, ok, wrong

_SEVERAL = 2
_ALONE = "no other engine serves this model"


def _agreement(
    check: str,
    field: str,
    value: Callable[[EngineFacts], str],
    change: str,
    untold: str = "",
) -> Callable[[Sequence[EngineFacts]], Iterator[Finding]]:
    """All engines of one model have the same of something; most of them are the measure.
    ``untold``: why it does not matter where none of them says anything."""

    def of(engines: Sequence[EngineFacts]) -> Iterator[Finding]:
        told = {engine.name: value(engine) for engine in engines}
        known = {name: text for name, text in told.items() if text}
        if len(engines) < _SEVERAL:
            yield not_applicable(check, _names(engines), _ALONE)
            return
        if not known and untold:
            yield not_applicable(check, _names(engines), untold)
            return
        for name in told:
            if name not in known:
                yield not_shown(check, name, f"its {field} is not known", change)
        if not known:
            return
        measure = Counter(known.values()).most_common(1)[0][0]
        first = next(name for name, text in known.items() if text == measure)
        for name, text in known.items():
            if text != measure:
                why = f"engines of one model differ: {field}"
                compared = {name: text, first: measure}
                yield wrong(check, f"{name}, {first}", why, change, compared, field=field)
        if len(set(known.values())) == 1 and len(known) > 1:
            yield ok(check, _names(engines), {field: measure})

    return of


def _of_fingerprint(field: str) -> Callable[[EngineFacts], str]:
    def value(engine: EngineFacts) -> str:
        found = engine.fingerprint
        return str(getattr(found, field)) if found is not None else ""

    return value


def _draft(engine: EngineFacts) -> str:
    """vLLM tells by its metrics alone."""
    untold = engine.kind == "vllm" and bool(engine.metrics_error)
    return "yes" if engine.draft else "" if untold else "none"


def _ranks(engine: EngineFacts) -> str:
    """Where the state is split by rank."""
    split = engine.layout is not None and engine.layout.tensor_parallel == "by_head"
    if not split:
        return "" if engine.layout is None else "every rank holds all of it"
    return str(engine.tensor_ranks) if engine.tensor_ranks else ""


def weights(engines: Sequence[EngineFacts]) -> Iterator[Finding]:
    """The same prompt has the same greedy answer everywhere."""
    answered = [e for e in engines if said(e.asked("fresh"))]
    if len(engines) < _SEVERAL:
        yield not_applicable("weights", _names(engines), _ALONE)
        return
    for engine in engines:
        if engine not in answered:
            why = engine.asked("fresh").error or "its answer is empty"
            yield not_shown("weights", engine.name, f"the canary failed: {why}")
    apart = {a.name: [b.name for b in answered if _apart(a, b)] for a in answered}
    if not any(apart.values()):
        if len(answered) > 1:
            yield ok("weights", _names(answered), {"answer": repr(answered[0].asked("fresh").text)})
        return
    first = min(answered, key=lambda engine: len(apart[engine.name]))
    for engine in answered:
        difference = _apart(engine, first)
        if difference:
            why = f"{first.model!r} stands for two sets of weights"
            change = "serve one model under one name; give each a weights_digest in kvatlas.toml"
            yield wrong("weights", f"{engine.name}, {first.name}", why, change, difference)


def _apart(one: EngineFacts, other: EngineFacts) -> dict[str, str]:
    return differing(one.asked("fresh"), other.asked("fresh"))


def ids_agree(engines: Sequence[EngineFacts]) -> Iterator[Finding]:
    """One text, and one chat, are the same token ids everywhere."""
    for check, what in (("tokenizer", "tokenizer"), ("chat-template", "chat template")):
        told = [(e.name, e.text_ids if check == "tokenizer" else e.chat_ids) for e in engines]
        known = [(name, ids) for name, ids in told if ids]
        for name, ids in known[1:]:
            first, theirs = known[0]
            at = first_difference(ids, theirs)
            if at is not None:
                compared = {name: _at(ids, at), first: _at(theirs, at)}
                why = f"engines of one model make other ids of one text, from token {at} on"
                change = f"give both the same {what}"
                yield wrong(check, f"{name}, {first}", why, change, compared, field=f"token {at}")


def first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """Where two rows part; None where they are equal."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def _at(ids: tuple[int, ...], at: int) -> str:
    return str(ids[at]) if at < len(ids) else "the end"


def layouts_agree(engines: Sequence[EngineFacts]) -> Iterator[Finding]:
    """Their state consists of the same parts, where blocks and dtypes are the same."""
    known = [e for e in engines if e.layout is not None and e.layout.groups]
    for engine in known[1:]:
        one, first = engine.layout, known[0].layout
        assert one is not None
        assert first is not None
        if (one.grid_tokens, one.kv_dtype) == (first.grid_tokens, first.kv_dtype):
            parts = layout_differences(one, first)
            if parts:
                why = "engines of one model keep other state"
                change = "run the same model and the same options of its KV on both"
                who = f"{engine.name}, {known[0].name}"
                yield wrong("layout", who, why, change, {"first difference": parts[0]})


def hash_seed(engines: Sequence[EngineFacts]) -> Iterator[Finding]:
    """Their own hashes of one block are the same: what stores and routers go by that use these."""
    known = [e for e in engines if e.stream.hashes]
    if len(engines) < _SEVERAL:
        yield not_applicable("hash-seed", _names(engines), _ALONE)
        return
    for engine in engines:
        if engine not in known:
            why = engine.stream.error or "no event of a canary was heard"
            yield not_shown("hash-seed", engine.name, f"hashes are seen in KV events: {why}")
    if len(known) < _SEVERAL:
        return
    first, same, apart = known[0], [known[0].name], False
    for engine in known[1:]:
        if engine.kind != first.kind or _algorithm(engine) != _algorithm(first):
            continue  # told by version-skew and hash-algorithm
        for group in engine.stream.hashes.keys() & first.stream.hashes.keys():
            ours, theirs = engine.stream.hashes[group], first.stream.hashes[group]
            if ours != theirs:
                apart = True
                compared = {engine.name: f"{ours:016x}", first.name: f"{theirs:016x}"}
                why = "two engines hash the same block otherwise"
                change = "start all with the same PYTHONHASHSEED and --prefix-caching-hash-algo"
                who = f"{engine.name}, {first.name}"
                yield wrong("hash-seed", who, why, change, compared, field=f"hash in {group}")
                break
            same += [engine.name] if engine.name not in same else []
    hashed = next(iter(first.stream.hashes.values()))
    if len(same) > 1:
        yield ok("hash-seed", ", ".join(same), {"hash": f"{hashed:016x}"})
    elif not apart:
        why = "their blocks, hash algorithms or engines are not the same: nothing to compare"
        yield not_shown("hash-seed", _names(known), why)


def _algorithm(engine: EngineFacts) -> str:
    return engine.fingerprint.hash_algorithm if engine.fingerprint is not None else ""


_SAME_RUN = "run the same on all engines of a model, or serve them under two names"
MODEL_CHECKS: tuple[Callable[[Sequence[EngineFacts]], Iterator[Finding]], ...] = (
    _agreement(
        "version-skew", "version", lambda e: f"{e.kind} {e.version}" if e.version else "", _SAME_RUN
    ),
    _agreement(
        "context",
        "max_model_len",
        lambda e: str(e.context_tokens) if e.context_tokens else "",
        "give all the same --max-model-len: else long prompts fail on some of them",
    ),
    _agreement(
        "dtype-skew", "kv_dtype", lambda e: e.kv_dtype, "give all the same --kv-cache-dtype"
    ),
    _agreement(
        "block-size-skew",
        "block_tokens",
        lambda e: str(e.told_block_tokens) if e.told_block_tokens else "",
        "give all the same --block-size (SGLang: --page-size)",
    ),
    _agreement(
        "tensor-parallel",
        "tensor_parallel",
        _ranks,
        "give all the same tensor parallel size; vLLM does not tell its own: set tensor_parallel "
        "in kvatlas.toml",
    ),
    _agreement("draft", "draft", _draft, _SAME_RUN),
    _agreement(
        "hash-algorithm",
        "hash_algorithm",
        _of_fingerprint("hash_algorithm"),
        "give all the same --prefix-caching-hash-algo",
        "none of them tells: hash-seed compares the hashes themselves",
    ),
    _agreement(
        "weights-digest",
        "weights_digest",
        _of_fingerprint("weights_digest"),
        "give all the same weights, and each the same weights_digest",
        "none is configured: see weights",
    ),
    weights,
    ids_agree,
    layouts_agree,
    hash_seed,
)


def _names(engines: Sequence[EngineFacts]) -> str:
    return ", ".join(engine.name for engine in engines)
