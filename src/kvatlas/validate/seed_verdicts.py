"""What of seed document 003 stands by the numbers: its conclusions, its decisions, its delta code.

Nothing is judged by hand: a verdict follows from figures at every efficiency between the ends of
`seed_case.REACHED`. Its decision matrix (chapter 9) is lost; the questions and its answers are
rebuilt from chapters 3 to 8, ours come from the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from kvatlas.report import economics
from kvatlas.report.money import STORAGE
from kvatlas.sim.plan import BLOCKS, hours
from kvatlas.validate.seed_case import (
    EXAMPLES,
    GROUPS,
    MEAN_TOKENS,
    OUTPUT_TOKENS,
    RENT,
    REQUESTS,
    SYSTEM,
    TOKEN_BYTES,
    V4_SLOWER,
    Case,
    case,
    ends,
    hand_off_s,
)
from kvatlas.workload.links import LINKS
from kvatlas.workload.models import load_layout
from kvatlas.workload.seed_003 import shown

Verdict = Literal["stands", "does not stand", "only if"]
FREE_SHARE = 0.01  # of the prefill before it: up to there a hand-over is called free
NEAR = 0.10  # a share is the same within so many points
#: Of docs/understanding/delta-coding.md: bytes as they are over bytes coded, all of SmolLM2's fp8.
DELTA_RATIO, PLAIN_RATIO = 1.144, 1.192
_BYTES, _DISK = "B", LINKS["NVMe-Gen5-x4"]


class Conclusion(msgspec.Struct, frozen=True):
    """One of the document's, with its number and ours (``low`` to ``high`` over what engines
    reach). ``condition``: on what it depends, or why not."""

    where: str
    claim: str
    verdict: Verdict
    condition: str
    unit: str
    seed: float
    computed: float
    low: float
    high: float


class Decision(msgspec.Struct, frozen=True):
    """One row of the decision matrix: both answers, and what ours rests on."""

    question: str
    seed: str
    ours: str
    rests_on: str


class Delta(msgspec.Struct, frozen=True):
    """One figure on delta coding: the document's estimate, and ours from the study's ratio."""

    what: str
    unit: str
    seed: float
    ours: float
    note: str


def conclusions() -> list[Conclusion]:
    """In the document's order."""
    return [
        *_sizes(),
        *_transfers(),
        *_reuse(),
        *_decode(),
        *_blocks(),
    ]


def _said(
    where: str,
    claim: str,
    unit: str,
    seed: float,
    figure: Callable[[Case], float],
    *,
    holds: Callable[[float], bool],
    condition: str,
    depends: bool = False,
) -> Conclusion:
    """It stands where it holds at every efficiency; ``depends``: its truth turns on ``condition``
    even where this case agrees."""
    computed, low, high = ends(figure)
    both = (holds(low), holds(high), holds(computed))
    verdict: Verdict = "stands" if all(both) else "only if" if any(both) else "does not stand"
    if depends:
        verdict = "only if"
    return Conclusion(where, claim, verdict, condition, unit, seed, computed, low, high)


def _near(seed: float) -> Callable[[float], bool]:
    """Within a factor of two."""
    return lambda value: seed / 2 <= value <= seed * 2


def _sizes() -> list[Conclusion]:
    model = case()
    stored = float(model.layout.resume_bytes(MEAN_TOKENS))
    most = (model.room_bytes() / REQUESTS - model.layout.resume_point_bytes()) / (
        model.layout.page_bytes_per_token()
    )
    million = REQUESTS * model.layout.resume_bytes(1_000_000)
    return [
        _said("intro", "KV of 100 requests is 2 MB", _BYTES, 2.02e6, lambda c: REQUESTS * stored,
              holds=_near(2.02e6),
              condition=f"a kilo was lost: {shown(model.layout.bytes_per_token(), _BYTES)} per "
              f"token, and {shown(model.layout.resume_point_bytes(), _BYTES)} per resume point"),
        _said("8.3", "HBM is no limit for KV (share that 100 requests fill)", "%", 0.0006,
              lambda c: 100 * REQUESTS * stored / c.room_bytes(), holds=lambda share: share <= 1,
              condition=f"100 requests stay below {most:,.0f} tokens each; at 1M tokens they need "
              f"{shown(million, _BYTES)} of {shown(model.room_bytes(), _BYTES)}", depends=True),
        _said("6", "one GPU holds 1.3 million requests of 4K", "", 1.3e6,
              lambda c: float(c.engine.batch_max(4096)), holds=_near(1.3e6),
              condition="by the same kilo, and by each one's resume point; as vLLM's pool holds "
              "them"),
        _said("7", "KV needs no stronger quantisation: INT4 saves 1 MB", _BYTES, 1e6,
              lambda c: REQUESTS * MEAN_TOKENS * c.layout.bytes_per_token() / 2,
              holds=_near(1e6),
              condition=f"contexts stay short: of 100 requests of 128K tokens it would save "
              f"{shown(REQUESTS * 131_072 * model.layout.bytes_per_token() / 2, _BYTES)}",
              depends=True),
    ]  # fmt: skip


def _transfers() -> list[Conclusion]:
    model = case()
    size_bytes = model.layout.resume_bytes(MEAN_TOKENS)

    def needed(c: Case) -> float:
        return size_bytes / (FREE_SHARE * c.engine.alone_s(0, MEAN_TOKENS))

    _, _, fast = ends(needed)
    slow = size_bytes / ends(lambda c: c.engine.alone_s(0, MEAN_TOKENS))[1]
    chain = model.layout.bytes_per_token() * MEAN_TOKENS
    old = load_layout("deepseek-v3", engine="vllm", kv_dtype="fp8").resume_bytes(MEAN_TOKENS)
    pcie = LINKS["PCIe-5-x16"].bytes_per_s
    return [
        _said("7", "handing over 100 requests' KV takes 0.03 ms", "s", 0.03e-3,
              lambda c: REQUESTS * hand_off_s(c), holds=_near(0.03e-3),
              condition=f"{chain / 20.2e3:.0f} times the bytes, and a resume point for each"),
        _said("7", "handing KV over is free (share of the prefill before it)", "%",
              100 * 0.03e-3 / 0.52,
              lambda c: 100 * hand_off_s(c) / c.engine.alone_s(0, MEAN_TOKENS),
              holds=lambda share: share <= 100 * FREE_SHARE,
              condition=f"the way really reaches {fast / 1e9:.0f} GB/s (then {FREE_SHARE:.0%}; "
              f"PCIe 5 reaches {pcie / 1e9:.3g}); below {slow / 1e9:.2g} GB/s computing is "
              "quicker", depends=True),
        _said("7", "5,000 times less to hand over than V3", "×", 5000,
              lambda c: old / c.layout.resume_bytes(MEAN_TOKENS), holds=_near(5000),
              condition="V3 has no resume points; without V4's it is "
              f"{old / model.layout.bytes_per_token() / MEAN_TOKENS:.1f} times"),
        _said("7", "experts' bytes outweigh KV's by thousands in each step", "×", 3000,
              lambda c: c.weights_read_bytes() / (REQUESTS * size_bytes), holds=_near(3000),
              condition="read from a GPU's own HBM, both; between GPUs only activations travel"),
    ]  # fmt: skip


def _saved(c: Case, output_tokens: int) -> float:
    """Share of all that prefix reuse saves, in %."""
    return 100 * (1 - c.both_dollars(True, output_tokens) / c.both_dollars(False, output_tokens))


def _worth_tokens(c: Case) -> float:
    """Tokens generated per request up to which reuse saves more than a batch twice as large."""
    saved = c.engine.dollars(c.prefill_s(False) - c.prefill_s(True)) / REQUESTS
    larger = (c.output_dollars(REQUESTS) - c.output_dollars(2 * REQUESTS)) / 1e6
    return saved / larger


def _held_dollars(c: Case) -> float:
    """An hour of all shared prefixes in host memory, resume points included."""
    size_bytes = (SYSTEM + GROUPS * EXAMPLES) * c.layout.page_bytes_per_token()
    size_bytes += (1 + GROUPS) * c.layout.resume_point_bytes()
    return STORAGE["dram"].dollars(size_bytes, 3600)


def _own_return() -> float:
    """The same by the document's own bytes and seconds, at our price of host memory."""
    saved = (0.52 - 0.20) * 8 * RENT.dollars_per_gpu_hour / 3600
    return saved / STORAGE["dram"].dollars(25.3e3, 3600)


def _reuse() -> list[Conclusion]:
    _, least, most = ends(_worth_tokens)
    return [
        _said("8.4", "prefill is 61 % shorter", "%", 61,
              lambda c: 100 * (1 - c.prefill_s(True) / c.prefill_s(False)),
              holds=lambda share: abs(share - 61) <= 100 * NEAR,
              condition="a little less: V4 resumes at multiples of 256, not at 1,500 and 2,000"),
        _said("8.4", "the first token comes 60 to 70 % sooner", "%", 65,
              lambda c: 100 * (1 - c.first_token_s(True) / c.first_token_s(False)),
              holds=lambda share: abs(share - 65) <= 100 * NEAR,
              condition="mean of 100 requests that come at once; its 10 to 20 ms are those of one "
              "alone"),
        _said("8.4", "storing prefixes costs nothing beside what they save ($ saved by one burst "
              "per $ of an hour's room)", "×", _own_return(),
              lambda c: c.engine.dollars(c.prefill_s(False) - c.prefill_s(True)) / _held_dollars(c),
              holds=lambda times: times >= 10,
              condition="not by 25 KB but by 108 MB, and still"),
        _said("8.6", "prefix reuse is the best return ($ saved, %)", "%", 22.5,
              lambda c: _saved(c, OUTPUT_TOKENS), holds=lambda share: share >= 10,
              condition=f"requests generate fewer than {least:,.0f} to {most:,.0f} tokens: beyond "
              "that a batch of 200 saves more; at 1,000 tokens reuse saves "
              f"{ends(lambda c: _saved(c, 1000))[0]:.0f} %", depends=True),
    ]  # fmt: skip


def _decode() -> list[Conclusion]:
    def experts(c: Case) -> float:
        read_s = c.weights_read_bytes() / (c.device.memory_rate() * c.spec.devices)
        return 100 * read_s / c.step_s()

    def listed(c: Case) -> float:
        return c.output_dollars(1024) * c.device.usd_per_hour / RENT.dollars_per_gpu_hour

    some, more = V4_SLOWER
    slower = f"a step takes what the time model says: published V4 runs took {some:.1f} to "
    slower += f"{more:.1f} times that, and then it is"
    model = case()
    cost, share, least = model.output_dollars(), experts(model), listed(model)
    hit = 100 * (1 - (1 - model.shape.routed_share) ** REQUESTS)
    return [
        _said("8.5", "decoding costs $4.4 per million tokens at batch 100", "$", 4.44,
              lambda c: c.output_dollars(), holds=_near(4.44),
              condition=f"{slower} ${cost * some:.2g} to ${cost * more:.2g}", depends=True),
        _said("8.5", "H100 is far from V4's public price ($0.28)", "$", 0.28, listed,
              holds=lambda dollars: dollars > 2 * 0.28,
              condition="the batch stays at 100 and the rent at $12. Computed: batch 1,024 at the "
              f"list price; as slow as published runs ${least * some:.2g} to ${least * more:.2g}",
              depends=True),
        _said("8.6", "reading experts is the bottleneck of decoding (share of a step)", "%", 100,
              experts, holds=lambda part: part >= 50,
              condition=f"{slower} {share / more:.0f} to {share / some:.0f} %; {hit:.0f} % of the "
              "experts are read in each step, from HBM", depends=True),
    ]  # fmt: skip


def _blocks() -> list[Conclusion]:
    each = case().layout.page_bytes_per_token()
    best = block(case())
    return [
        _said("6", "metadata is 16 to 24 % of a 16-token block", "%", 20,
              lambda c: 100 * economics.HOLDER_BYTES / (16 * each), holds=_near(20),
              condition=f"a block of 16 tokens has {shown(16 * each, _BYTES)}, not 101 bytes"),
        _said("6", "256 tokens is the block to take", "", 256, lambda c: float(best),
              holds=lambda tokens: tokens == 256,
              condition="for another reason: V4 resumes at multiples of 256, so smaller ones find "
              "nothing more, and larger ones lose the end of a match"),
    ]  # fmt: skip


def block(c: Case) -> int:
    """The size that `kvatlas plan` would take for this case, over one NVMe drive."""
    rows = [
        economics.block_size(
            tokens,
            grid_tokens=c.layout.grid_tokens,
            prompt_tokens=MEAN_TOKENS,
            bytes_per_token=c.layout.page_bytes_per_token(),
            token_s=c.engine.alone_s(0, MEAN_TOKENS) / MEAN_TOKENS,
            bytes_per_s=_DISK.bytes_per_s,
            latency_s=_DISK.latency_s,
        )
        for tokens in BLOCKS
    ]
    return economics.best_block(rows).block_tokens


# -- decisions ----------------------------------------------------------------------------------


def decisions() -> list[Decision]:
    """The matrix of chapter 9, anew."""
    return [*_decisions_on_state(), *_decisions_on_moves()]


def _pick(yes: bool, one: str, other: str) -> str:
    return one if yes else other


def _decisions_on_state() -> list[Decision]:
    model = case()
    share = 100 * (1 - model.output_dollars() / model.both_dollars(False, OUTPUT_TOKENS))
    at_1000 = 100 * (1 - model.output_dollars() / model.both_dollars(False, 1000))
    each = model.layout.resume_bytes(MEAN_TOKENS)
    fits = (model.room_bytes() - REQUESTS * each) / each
    rate = REQUESTS / (model.prefill_s(False) + OUTPUT_TOKENS * model.step_s())
    full_s = fits / rate
    most = (model.room_bytes() / REQUESTS - model.layout.resume_point_bytes()) / (
        model.layout.page_bytes_per_token()
    )
    return [
        Decision("what to optimise first", "hits: prefill is all that is left to save",
                 _pick(share >= 50, "hits", "the batch") + " at 100 tokens generated, "
                 + _pick(at_1000 >= 50, "hits", "the batch") + " at 1,000",
                 f"prefill is {share:.0f} % of the cost at 100 tokens generated, "
                 f"{at_1000:.0f} % at 1,000"),
        Decision("is HBM a limit", "no: 2 MB of 356 GB",
                 _pick(most < 1_000_000, "from some length on", "no"),
                 f"100 requests fill it at {most:,.0f} tokens each"),
        Decision("strategy 1: eviction", "never happens, LRU as a fallback",
                 _pick(full_s < 3600, "needed, and its policy matters", "not needed"),
                 f"prefixes that are kept fill HBM after {hours(full_s)} at "
                 f"{rate:.0f} requests/s"),
        Decision("strategy 2: attention scores", "little value: CSA chose already",
                 "not by these numbers", "docs/understanding/attention.md measures it"),
        Decision("strategy 3: prefix tree", "the core", _tree(model),
                 f"one burst of 100 saves "
                 f"{model.prefill_s(False) - model.prefill_s(True):.2g} s of 8 GPUs"),
        Decision("block", "256 tokens, tree nodes of 512 to 1,024",
                 f"{block(model)} tokens, nodes too",
                 "a node of 1,024 loses 512 tokens of a match on average, one of 256 loses 128"),
        Decision("quantise KV further", "no: it saves 1 MB",
                 _pick(most < 131_072, "where contexts are long", "no"),
                 f"INT4 lifts the limit of 100 requests from {most:,.0f} tokens to "
                 f"{2 * most:,.0f}, resume points as they are"),
    ]  # fmt: skip


def _tree(model: Case) -> str:
    times = model.engine.dollars(model.prefill_s(False) - model.prefill_s(True))
    return _pick(times > 10 * _held_dollars(model), "keep", "do not keep") + " shared prefixes"


def _decisions_on_moves() -> list[Decision]:
    model = case()
    size_bytes = model.layout.resume_bytes(MEAN_TOKENS)
    position = MEAN_TOKENS // model.layout.grid_tokens * model.layout.grid_tokens
    saved_s = model.engine.saved_s(position)
    won = model.engine.dollars(model.engine.busy_s(position))
    found = []
    for tier, link in (("dram", LINKS["PCIe-5-x16"]), ("disk", _DISK)):
        took_s = economics.load_s(size_bytes, link.bytes_per_s, link.latency_s)
        longest_s = economics.longest_s(
            won - model.engine.dollars(took_s), STORAGE[tier].dollars(size_bytes, 1)
        )
        said = "never" if longest_s is None else f"up to {hours(longest_s)} for one reuse"
        found.append(
            Decision(f"prefixes in {tier}", "a pool for reuse, not for overflow",
                     _pick(took_s < saved_s, f"both: {said}", "no: computing is quicker"),
                     f"3,200 tokens: load {took_s * 1e3:.2g} ms, compute {saved_s * 1e3:.3g} ms")
        )  # fmt: skip
    share = 100 * hand_off_s(model) / model.engine.alone_s(0, MEAN_TOKENS)
    tcp_s = size_bytes / LINKS["TCP-100G"].bytes_per_s
    return [
        *found,
        Decision("prefill and decode apart", "next to free",
                 _pick(share < 10, "cheap over PCIe or RDMA; watch the transport", "costly"),
                 f"{share:.1f} % of the prefill over PCIe 5, "
                 f"{100 * tcp_s / model.engine.alone_s(0, MEAN_TOKENS):.0f} % over TCP"),
        Decision("strategy 4: send ahead", "the key where prefill and decode are apart",
                 _pick(tcp_s > 0.1 * saved_s, "on slow ways, and for long contexts", "no"),
                 f"it hides {hand_off_s(model) * 1e3:.2g} ms (PCIe 5) to {tcp_s * 1e3:.2g} ms "
                 "(TCP) per request"),
        Decision("delta coding", "not for V4: nothing left to save",
                 _pick(DELTA_RATIO > PLAIN_RATIO, "yes", "no: it gains less than a plain codec"),
                 f"ratio {DELTA_RATIO} against {PLAIN_RATIO}, on SmolLM2; V4: not known"),
    ]  # fmt: skip


# -- delta coding -------------------------------------------------------------------------------


def delta() -> list[Delta]:
    """Chapter 11's estimate beside the study (docs/understanding/delta-coding.md)."""
    layout = case().layout

    def spared(tokens: int) -> tuple[float, float]:
        seed, ours = TOKEN_BYTES * tokens, layout.bytes_per_token() * tokens
        return seed * (1 - 1 / 5), ours * (1 - 1 / DELTA_RATIO)

    many, long = spared(REQUESTS * MEAN_TOKENS), spared(REQUESTS * 1_000_000)
    return [
        Delta("a predicted row, of a whole one", "%", 25,
              100 * PLAIN_RATIO / DELTA_RATIO, "1 to 7 % more than no prediction, by component"),
        Delta("how much smaller, in all (5 to 13)", "×", 9, DELTA_RATIO,
              "all of SmolLM2's KV in fp8, nothing lost; V4 is not known"),
        Delta("the same by its own premise: a quarter, key rows every 16", "×", 9,
              16 / (1 + 15 / 4), "at most 4, at any distance"),
        Delta("what a plain codec does", "×", 1, PLAIN_RATIO, "left out there: zstd, fp8"),
        Delta("saved of 100 requests of 3,200 tokens", "B", *many, "it has 5 times; ours at "
              "SmolLM2's ratio"),
        Delta("saved of 100 requests of 1M tokens", "B", *long, "the same"),
    ]  # fmt: skip


def by_verdict(found: Sequence[Conclusion]) -> dict[Verdict, int]:
    """How many there are of each."""
    counts: dict[Verdict, int] = {"stands": 0, "only if": 0, "does not stand": 0}
    for each in found:
        counts[each.verdict] += 1
    return counts
