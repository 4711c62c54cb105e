"""Checks of one engine by itself: what it tells against what it does with canaries."""

from __future__ import annotations

from collections.abc import Iterator

from kvatlas.core.check_facts import Asked, EngineFacts
from kvatlas.core.findings import Finding, not_applicable, not_shown, ok, wrong

#: Minor versions that were run in our tests, by engine; docs/support-matrix.md has the same.
SUPPORTED: dict[str, tuple[str, ...]] = {"vllm": ("0.32",), "sglang": ("0.5.23",)}

#: Clocks further apart make deadlines, leases and TTLs mean something else on each side.
CLOCK_S = 2.0

_UNTOLD = "its answers do not tell cached tokens"
_TELL = "start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report"


def reach(engine: EngineFacts) -> Iterator[Finding]:
    """It answers."""
    if engine.error:
        change = "start it, or correct its URL; all that is said of it below is not shown"
        yield not_shown("reach", engine.name, engine.error, change)
    else:
        yield ok("reach", engine.name, {"url": engine.url, "models": ", ".join(engine.models)})


def version(engine: EngineFacts) -> Iterator[Finding]:
    """Its version is one that we tested."""
    tested = ", ".join(SUPPORTED.get(engine.kind, ()))
    compared = {"version": engine.version or "not told", "tested": tested or "none"}
    if not engine.version or not tested:
        yield not_shown("version", engine.name, "it does not tell its version", "", compared)
    elif why := untested(engine.kind, engine.version):
        change = f"run {engine.kind} {tested}, or expect events and metrics to differ"
        yield wrong("version", engine.name, why, change, compared)
    else:
        yield ok("version", engine.name, compared)


def untested(kind: str, version: str) -> str:
    """Why a version of an engine is not one that we tested; "" where it is, or is not told."""
    tested = SUPPORTED.get(kind, ())
    if not version or any(version == t or version.startswith(f"{t}.") for t in tested):
        return ""
    return f"{kind} {version} is not in the support matrix"


def clock(engine: EngineFacts) -> Iterator[Finding]:
    """Its clock is ours, by the date of its answers."""
    if engine.clock_ahead_s is None:
        yield not_shown("clock", engine.name, "its answers have no date")
        return
    compared = {"ahead_s": f"{engine.clock_ahead_s:.1f}", "allowed_s": f"{CLOCK_S:g}"}
    # A date has whole seconds.
    if abs(engine.clock_ahead_s) > CLOCK_S + 1:
        why = f"its clock is {engine.clock_ahead_s:+.0f} s from ours"
        change = "run NTP on both hosts"
        yield wrong("clock", engine.name, why, change, compared)
    else:
        yield ok("clock", engine.name, compared)


def metrics(engine: EngineFacts) -> Iterator[Finding]:
    """Its own counters counted the canaries."""
    if engine.metrics_error:
        yield not_shown("metrics", engine.name, engine.metrics_error)
    elif engine.counted_tokens is None or engine.canary_tokens <= 0:
        why = "its page does not count prompt tokens, or no canary was answered"
        yield not_shown("metrics", engine.name, why)
    else:
        compared = {"counted tokens": engine.counted_tokens, "asked": engine.canary_tokens}
        if engine.counted_tokens >= engine.canary_tokens:
            yield ok("metrics", engine.name, compared)
        else:
            why = "its metrics counted less than it was asked"
            change = "its URL must lead to this one engine: not to a balancer over several"
            yield wrong("metrics", engine.name, why, change, compared)


def prefix_cache(engine: EngineFacts) -> Iterator[Finding]:
    """The same prompt twice: the second resumes."""
    check, who = "prefix-cache", engine.name
    again = engine.asked("again")
    expected = _resumable(engine, again)
    compared = {"cached tokens": _told(again), "expected": expected}
    on = "switch prefix caching on (vLLM: no --no-enable-prefix-caching; SGLang: no "
    on += "--disable-radix-cache)"
    if engine.caching == "False":
        yield wrong(check, who, "it says that its prefix caching is off", on, compared)
    elif again.error:
        yield not_shown(check, who, f"the canary failed: {again.error}")
    elif again.cached_tokens < 0 and engine.counted_hits == 0:
        why = "the same prompt twice, and its counters show no hit at all"
        yield wrong(check, who, why, on, {"counted hits": 0, "expected": expected})
    elif again.cached_tokens < 0:
        counted = {} if engine.counted_hits is None else {"counted hits": engine.counted_hits}
        yield not_shown(check, who, _UNTOLD, _TELL, counted)  # its counters count others, too
    elif expected <= 0:
        yield not_shown(check, who, f"{again.prompt_tokens} tokens are too few for a block")
    elif again.cached_tokens == 0:
        yield wrong(check, who, "the same prompt twice, and nothing was resumed", on, compared)
    elif again.cached_tokens * 2 < expected:
        why = "the same prompt twice, and less than half of it was resumed"
        change = "is its cache full, or its retention short (--prefix-cache-retention-interval)?"
        yield wrong(check, who, why, change, compared)
    else:
        yield ok(check, who, compared)


def hits_told(engine: EngineFacts) -> Iterator[Finding]:
    """Its answers say what they resumed: what promises are compared with."""
    again = engine.asked("again")
    if again.error:
        yield not_shown("hits-told", engine.name, f"the canary failed: {again.error}")
    elif again.cached_tokens < 0:
        yield not_shown("hits-told", engine.name, _UNTOLD, _TELL)
    else:
        yield ok("hits-told", engine.name, {"cached tokens": again.cached_tokens})


def salt(engine: EngineFacts) -> Iterator[Finding]:
    """Another salt shares nothing, the same one does."""
    check, who = "salt", engine.name
    plain, other, same = (engine.asked(n) for n in ("again", "salted", "salted again"))
    failed = next((a.error for a in (plain, other, same) if a.error), "")
    if failed:
        yield not_shown(check, who, f"a canary failed: {failed}")
    elif other.cached_tokens < 0 or plain.cached_tokens <= 0:
        why = _UNTOLD if other.cached_tokens < 0 else "nothing is resumed without a salt either"
        yield not_shown(check, who, why, _TELL if other.cached_tokens < 0 else "")
    elif other.cached_tokens > 0:
        compared = {"cached under another salt": other.cached_tokens, "expected": 0}
        why = "it resumed a prompt that was cached under another salt: tenants are not apart"
        change = "run a version that knows cache_salt, and let no proxy take it out of the body"
        yield wrong(check, who, why, change, compared)
    elif same.cached_tokens == 0:
        compared = {"cached under the same salt": 0, "without": plain.cached_tokens}
        why = "a prompt with a salt is never resumed, not even under the same salt"
        yield wrong(check, who, why, "let no proxy change cache_salt", compared)
    else:
        yield ok(check, who, {"other salt": 0, "same salt": same.cached_tokens})


def right_answer(engine: EngineFacts) -> Iterator[Finding]:
    """An answer from cached state is the one from computed state."""
    check, who = "right-answer", engine.name
    fresh, again = engine.asked("fresh"), engine.asked("again")
    if fresh.error or again.error:
        yield not_shown(check, who, f"a canary failed: {fresh.error or again.error}")
        return
    if again.cached_tokens < 0:
        yield not_shown(check, who, _UNTOLD, _TELL)
        return
    if again.cached_tokens == 0:
        yield not_shown(check, who, "nothing was resumed, so nothing was answered from the cache")
        return
    if not said(fresh) or not said(again):
        yield not_shown(check, who, "an answer is empty: there is nothing to compare")
        return
    difference = differing(fresh, again)
    if difference:
        why = "the same prompt has another greedy answer once it is resumed from the cache"
        change = "trust no hit of it: run kvatlas validate exactness, and look at its KV connector"
        yield wrong(check, who, why, change, difference)
    else:
        yield ok(check, who, {"computed": repr(fresh.text), "resumed": repr(again.text)})


def tokenizer(engine: EngineFacts) -> Iterator[Finding]:
    """A text and the token ids that its own endpoint makes of it are one prompt."""
    if engine.tokenize_error:
        yield not_shown("tokenizer", engine.name, engine.tokenize_error)
    else:
        text = "the text of the same canary"
        yield _same_prompt("tokenizer", engine, engine.asked("text"), len(engine.text_ids), text)


def chat_template(engine: EngineFacts) -> Iterator[Finding]:
    """A chat and the token ids that its own endpoint makes of it are one prompt."""
    check, who = "chat-template", engine.name
    chat = engine.asked("chat")
    if engine.chat_error and chat.error:
        yield not_applicable(check, who, f"it takes no chats: {engine.chat_error}")
    elif engine.chat_error:
        yield not_shown(check, who, engine.chat_error)
    elif chat.error:
        yield not_shown(check, who, f"the canary failed: {chat.error}")
    elif chat.prompt_tokens != len(engine.chat_ids) and chat.prompt_tokens >= 0:
        compared = {"tokens of the chat": chat.prompt_tokens, "by tokenize": len(engine.chat_ids)}
        why = "it renders a chat otherwise than its tokenize endpoint says"
        change = "give both the same chat template (--chat-template), and the gateway, too"
        yield wrong(check, who, why, change, compared)
    else:
        by_ids = engine.asked("chat ids")
        yield _same_prompt(check, engine, by_ids, len(engine.chat_ids), "a chat by its token ids")


def _same_prompt(check: str, engine: EngineFacts, asked: Asked, tokens: int, what: str) -> Finding:
    """``asked`` must have ``tokens`` tokens and resume what was cached as the other form of it."""
    who = engine.name
    if asked.error:
        return not_shown(check, who, f"the canary failed: {asked.error}")
    change = "give it the tokenizer and chat template of the model that it serves"
    if 0 <= asked.prompt_tokens != tokens:
        compared = {"tokens of the answer": asked.prompt_tokens, "by tokenize": tokens}
        return wrong(check, who, "it counts other tokens than it tells", change, compared)
    if asked.cached_tokens < 0:
        return not_shown(check, who, _UNTOLD, _TELL)
    if engine.asked("again").cached_tokens <= 0:
        return not_shown(check, who, "nothing is resumed at all: see prefix-cache")
    expected = _resumable(engine, asked)
    compared = {"cached tokens": asked.cached_tokens, "expected": expected}
    if asked.cached_tokens * 2 < expected:
        return wrong(check, who, f"{what} did not resume what was cached", change, compared)
    return ok(check, who, compared)


def block_size(engine: EngineFacts) -> Iterator[Finding]:
    """Blocks are of the size that everybody counts with."""
    check, who = "block-size", engine.name
    known = {g.block_tokens for g in engine.layout.groups} if engine.layout else set()
    seen = engine.stream.blocks
    expected = sorted(known) if known else [engine.told_block_tokens]
    compared = {"in its events": _sizes(seen), "expected": _sizes(expected)}
    change = "let the worker's layout be auto, or the block size that the engine runs with"
    if engine.layout is not None and engine.layout.groups and not engine.layout.components:
        plain = engine.layout.grid_tokens
        if engine.told_block_tokens and plain != engine.told_block_tokens:
            compared = {
                "configured": str(plain),
                "as the engine tells": str(engine.told_block_tokens),
            }
            why = "the configuration counts in other blocks than the engine"
            yield wrong(check, who, why, change, compared)
            return
    if not seen:
        why = engine.stream.error or "no event of a canary was heard"
        yield not_shown(check, who, f"blocks are seen in KV events: {why}")
    elif not any(expected):
        yield not_shown(check, who, "it does not tell its block size", "", compared)
    elif set(seen) <= set(expected):
        yield ok(check, who, compared)
    else:
        why = "its events are in other blocks than expected"
        yield wrong(check, who, why, change, compared)


def dtype(engine: EngineFacts) -> Iterator[Finding]:
    """Its KV has the dtype that the configuration says."""
    configured = engine.configured_kv_dtype
    compared = {"as the engine tells": engine.kv_dtype, "configured": configured}
    if not engine.kv_dtype:
        yield not_shown("dtype", engine.name, "it does not tell the dtype of its KV", "", compared)
    elif configured in ("", "auto") or _same_dtype(configured, engine.kv_dtype):
        yield ok("dtype", engine.name, compared)
    else:
        why = "the KV dtype of the configuration is not the engine's"
        change = "set the worker's kv_dtype to what it runs with (--kv-cache-dtype), or auto"
        yield wrong("dtype", engine.name, why, change, compared)


def layout(engine: EngineFacts) -> Iterator[Finding]:
    """What its state consists of is known."""
    if engine.layout_error:
        change = "set the worker's layout to the model's config.json, or a plain block size"
        yield not_shown("layout", engine.name, engine.layout_error, change)
    elif engine.layout is None:
        yield not_shown("layout", engine.name, "it was not asked")
    else:
        found = engine.layout
        yield ok(
            "layout", engine.name, {"layout": f"{found.model or 'plain'}, {found.grid_tokens}"}
        )


def said(asked: Asked) -> bool:
    """Whether there is an answer that can be compared."""
    return not asked.error and bool(asked.text or asked.logprobs)


def differing(one: Asked, other: Asked) -> dict[str, str]:
    """Where two greedy answers to one prompt differ beyond rounding; {} where they do not.

    Where both tell logprobs, these count: texts alone do not show weights that differ a little,
    and a near tie that was decided otherwise is no difference.
    """
    answers = {"answer": repr(one.text), "other answer": repr(other.text)}
    rows = zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=False)
    for index, (token, theirs, a, b) in enumerate(rows):
        if abs(a - b) > _ROUNDING:
            return answers | {"logprobs": f"{a:.3f}, {b:.3f} at token {index}"}
        if token != theirs:
            return {}  # as likely as each other; what follows has another prefix
    told = bool(one.logprobs and other.logprobs)
    return {} if told or one.text == other.text else answers


_ROUNDING = 0.25  # of a logprob: other batches, kernels and machines stay below


def _resumable(engine: EngineFacts, asked: Asked) -> int:
    """Of a prompt that is cached as a whole: its last token is computed anyway."""
    grid = engine.layout.grid_tokens if engine.layout is not None else engine.told_block_tokens
    grid = grid if 0 < grid < 1 << 20 else max(engine.told_block_tokens, 1)
    return max(0, (asked.prompt_tokens - 1) // grid * grid)


def _told(asked: Asked) -> str:
    return "not told" if asked.cached_tokens < 0 else str(asked.cached_tokens)


def _sizes(sizes: object) -> str:
    return ", ".join(map(str, sizes)) if isinstance(sizes, tuple | list) else str(sizes)


def _same_dtype(configured: str, told: str) -> bool:
    """fp8 is said in several ways: fp8_e4m3, fp8_ds_mla."""
    one, other = (text.lower().removeprefix("torch.") for text in (configured, told))
    return one == other or one.startswith(other) or other.startswith(one) or other == "auto"


#: In the order in which they are told. Those after the first say nothing of one that is not there.
ENGINE_CHECKS = (
    reach,
    version,
    clock,
    metrics,
    hits_told,
    prefix_cache,
    right_answer,
    salt,
    tokenizer,
    chat_template,
    block_size,
    dtype,
    layout,
)
