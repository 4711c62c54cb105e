"""Chapter 8 of seed document 003, line by line: eight H100 run V4 Flash for 100 requests.

Each figure three times: as the document says it, by its own inputs and formula, and computed from
the model's layout and the time model. Of the computed ones that depend on what an engine reaches of
the hardware there are two ends: every efficiency that calibration ever fitted lies between them
(docs/calibration.md). Its workload's table (8.2), the one of what is saved (8.4) and the one of
prefill's cost (8.5) are lost; they are rebuilt from the text around them, and marked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from statistics import fmean

import msgspec

from kvatlas.report.economics import per_million
from kvatlas.report.money import Price
from kvatlas.sim.cluster import ClusterFile, EngineTable, build
from kvatlas.sim.plan_engines import Engine, kinds
from kvatlas.workload.links import LINKS
from kvatlas.workload.models import load_config
from kvatlas.workload.profiles import DeviceTable
from kvatlas.workload.shape import Shape, shape_of

MODEL, DEVICE, GPUS = "deepseek-v4-flash", "H100", 8
REQUESTS, GROUPS, GROUP = 100, 5, 20
LONG, LONG_TOKENS, SHORT, SHORT_TOKENS = 20, 8000, 80, 2000
SYSTEM, EXAMPLES = 1500, 500  # tokens that all share, and that a group shares behind them
MEAN_TOKENS = 3200
TOKEN_BYTES, TOKEN_FLOPS, FLOPS, PCIE = 6.3, 26e9, 16e15, 64e9  # its own
RENT = Price(12.0, "seed 003, 8.5")  # an hour of one H100
OUTPUT_TOKENS = 100  # rebuilt: its totals hold where a request generates about so many
#: What is reached of FLOP/s and of bandwidth: the least ever fitted, typical, the most.
REACHED = {"low": (0.24, 0.54), "typical": (0.45, 0.8), "high": (0.88, 1.0)}

#: How many times as long as the time model says published runs of V4 Flash took per token (its
#: TPOT was 47 to 72 % off: docs/calibration.md). No end of `REACHED` explains that.
V4_SLOWER = (1 / (1 - 0.47), 1 / (1 - 0.72))


class Line(msgspec.Struct, frozen=True):
    """One figure of the document. ``own``: by its own inputs (None: its estimate, nothing to
    reckon); ``computed`` with its two ends where they differ. ``rebuilt``: its table is lost."""

    where: str
    what: str
    unit: str
    seed: float
    own: float | None
    computed: float | None
    low: float | None = None
    high: float | None = None
    rebuilt: bool = False
    note: str = ""


class Case:
    """The deployment at one efficiency."""

    def __init__(self, reached: tuple[float, float]) -> None:
        own = DeviceTable(
            name="case",
            like=DEVICE,
            compute_efficiency=reached[0],
            memory_efficiency=reached[1],
        )
        table = EngineTable(
            model=MODEL, kv_dtype="fp8", device="case", devices=GPUS, max_running=1 << 16
        )
        cluster = build(ClusterFile(engine=(table,), device=(own,)), lambda place: place)
        (kind,) = kinds(cluster)
        self.engine = Engine(kind, RENT)
        self.layout, self.spec = kind.layout, kind.spec
        assert self.spec.device is not None
        assert self.spec.shape is not None
        assert self.layout.compute is not None
        self.device, self.shape, self.compute = (
            self.spec.device,
            self.spec.shape,
            self.layout.compute,
        )

    def prefill_s(self, shared: bool) -> float:
        """Engine time of all 100 prompts."""
        return sum(self.each_s(shared))

    def each_s(self, shared: bool) -> list[float]:
        """Engine time of each prompt in the order in which they come: one in five is long."""
        return [
            self.engine.busy_s(tokens) - (self.engine.busy_s(start) if start else 0.0)
            for start, tokens in prompts(shared)
        ]

    def first_token_s(self, shared: bool) -> float:
        """Mean over the requests where all come at once and are computed in turn."""
        done, at = [], 0.0
        for seconds in self.each_s(shared):
            at += seconds
            done.append(at)
        return fmean(done)

    def step_s(self, batch: int = REQUESTS, context: int = MEAN_TOKENS) -> float:
        """Seconds of a decode step."""
        return self.engine.step_s(context, batch)

    def output_dollars(self, batch: int = REQUESTS) -> float:
        """Per million tokens generated, prompts left out."""
        return per_million(self.engine.dollars(self.step_s(batch)), batch)

    def both_dollars(self, shared: bool, output_tokens: int) -> float:
        """Per million tokens generated, what their prompts cost included."""
        prompts_dollars = self.engine.dollars(self.prefill_s(shared))
        return self.output_dollars() + per_million(prompts_dollars, REQUESTS * output_tokens)

    def room_bytes(self) -> float:
        """For KV in one GPU: V4's lies in each as a whole."""
        weights = self.shape.weight_bytes(self.compute, "fp8") + self.shape.head * 2.0
        return 0.9 * self.device.memory_bytes - weights / GPUS

    def weights_read_bytes(self, batch: int = REQUESTS) -> float:
        """That one decode step reads, over all GPUs: dense ones, and the experts that are hit."""
        touched = 1 - (1 - self.shape.routed_share) ** batch
        return self.shape.dense(self.compute) + self.shape.head + self.shape.routed * touched


def prompts(shared: bool) -> list[tuple[int, int]]:
    """(Where it resumes, its tokens) of each prompt, in turn over groups and lengths.

    Resumed on V4's grid of 256 tokens: behind 1,500 shared ones at 1,280, behind 2,000 at 1,792.
    The first of each group is a short one.
    """
    found = []
    for index in range(REQUESTS):
        tokens = LONG_TOKENS if index % GROUP >= GROUP - LONG // GROUPS else SHORT_TOKENS
        start = 0
        if shared and index:
            start = (SYSTEM if index % GROUP == 0 else SYSTEM + EXAMPLES) // 256 * 256
        found.append((start, tokens))
    return found


@functools.cache
def case(reached: str = "typical") -> Case:
    """At one of `REACHED`."""
    return Case(REACHED[reached])


def ends(figure: Callable[[Case], float]) -> tuple[float, float, float]:
    """A figure at typical efficiency, and its two ends."""
    typical, one, other = (figure(case(name)) for name in ("typical", "low", "high"))
    return typical, min(one, other, typical), max(one, other, typical)


@functools.cache
def lines() -> tuple[Line, ...]:
    """Chapter 8 in its order."""
    return (*_setting(), *_without(), *_with(), *_first_tokens(), *_money())


def _plain(
    where: str,
    what: str,
    unit: str,
    said: tuple[float, float | None],
    computed: float | None,
    *,
    rebuilt: bool = False,
    note: str = "",
) -> Line:
    """``said``: by the document, and by its own inputs."""
    return Line(where, what, unit, *said, computed, rebuilt=rebuilt, note=note)


def _ranged(
    where: str,
    what: str,
    unit: str,
    said: tuple[float, float | None],
    figure: Callable[[Case], float],
    *,
    rebuilt: bool = False,
    note: str = "",
) -> Line:
    """The same where it depends on what the engine reaches."""
    typical, low, high = ends(figure)
    return Line(where, what, unit, *said, typical, low, high, rebuilt, note)


def _setting() -> list[Line]:
    model = case()
    shape: Shape = shape_of(load_config(MODEL))
    weights = shape.weight_bytes(model.compute, "fp8") + shape.head * 2.0
    memory = model.device.memory_bytes
    return [
        _plain("8.1", "HBM of 8 GPUs", "B", (640e9, 8 * 80e9), 8.0 * memory,
               note="a sheet's 80 GB are GiB"),
        _plain("8.1", "weights in FP8", "B", (284e9, 284e9), weights),
        _plain("8.1", "weights in one GPU", "B", (35.5e9, 284e9 / 8), weights / GPUS),
        _plain("8.1", "room for KV in one GPU", "B", (67e9, 80e9 - 35.5e9), model.room_bytes(),
               note="67 GB counts active weights only; all experts lie there"),
        _plain("8.1", "room for KV in all", "B", (356e9, 640e9 - 284e9), model.room_bytes(),
               note="V4's KV lies in each GPU as a whole: one GPU's room is all there is"),
        _ranged("8.1", "operations per second, FP8", "FLOP", (16e15, 8 * 1978e12),
                lambda c: GPUS * c.device.compute_rate("fp8"), note="computed: what is reached"),
        _plain("8.2", "requests of 8,000 tokens", "", (20, LONG), LONG, rebuilt=True),
        _plain("8.2", "requests of 2,000 tokens", "", (80, SHORT), SHORT, rebuilt=True,
               note="they hold 1,500 + 500 shared tokens and nothing of their own"),
    ]  # fmt: skip


def _without() -> list[Line]:
    model = case()
    tokens = LONG * LONG_TOKENS + SHORT * SHORT_TOKENS
    alone = sum(model.compute.prefill_flops(0, n) for _, n in prompts(shared=False))
    own_bytes = MEAN_TOKENS * TOKEN_BYTES
    chain = model.layout.bytes_per_token() * MEAN_TOKENS
    stored = float(model.layout.resume_bytes(MEAN_TOKENS))
    most = model.engine.batch_max(MEAN_TOKENS)
    return [
        _plain("8.3", "prompt tokens", "", (320_000, tokens), tokens),
        _plain("8.3", "operations of prefill", "FLOP", (8.32e15, tokens * TOKEN_FLOPS), alone),
        _ranged("8.3", "prefill, in theory", "s", (0.52, tokens * TOKEN_FLOPS / FLOPS),
                lambda c: c.prefill_s(False)),
        _ranged("8.3", "prefill, 'in practice' (0.7 to 0.9)", "s", (0.8, None),
                lambda c: c.prefill_s(False)),
        _plain("8.3", "KV of one token", "B", (6.3, TOKEN_BYTES), model.layout.bytes_per_token()),
        _plain("8.3", "KV of one request", "B", (20.2e3, own_bytes), chain),
        _plain("8.3", "KV of 100 requests", "B", (2.02e6, REQUESTS * own_bytes), REQUESTS * chain),
        _plain("8.3", "the same with resume points", "B", (2.02e6, REQUESTS * own_bytes),
               REQUESTS * stored, note="left out there; as the engine stores it"),
        _plain("8.3", "of the room for KV", "%", (0.0006, 100 * REQUESTS * own_bytes / 356e9),
               100 * REQUESTS * stored / model.room_bytes()),
        _plain("8.3", "requests that decode at once", "", (100, REQUESTS), float(most),
               note="'thousands' in theory; computed: what fits beside one prompt"),
    ]  # fmt: skip


def _with() -> list[Line]:
    model = case()
    own_saved = 99 * SYSTEM + GROUPS * (GROUP - 1) * EXAMPLES
    saved = sum(start for start, _ in prompts(shared=True))
    tokens = LONG * LONG_TOKENS + SHORT * SHORT_TOKENS
    flops = sum(model.compute.prefill_flops(start, n) for start, n in prompts(shared=True))
    own_flops = (tokens - own_saved) * TOKEN_FLOPS
    each = model.layout.bytes_per_token()
    return [
        _plain("8.4", "tokens not computed", "", (196_000, own_saved), saved, rebuilt=True,
               note="V4 resumes at multiples of 256 only"),
        _plain("8.4", "tokens computed", "", (124_000, tokens - own_saved), tokens - saved),
        _plain("8.4", "operations of prefill", "FLOP", (3.22e15, own_flops), flops),
        _ranged("8.4", "prefill, in theory", "s", (0.20, own_flops / FLOPS),
                lambda c: c.prefill_s(True)),
        _ranged("8.4", "prefill, 'in practice' (0.3 to 0.4)", "s", (0.35, None),
                lambda c: c.prefill_s(True)),
        _ranged("8.4", "prefill is shorter by", "%", (61, 100 * own_saved / tokens),
                lambda c: 100 * (1 - c.prefill_s(True) / c.prefill_s(False))),
        _plain("8.4", "KV of the system prompt", "B", (9.5e3, SYSTEM * TOKEN_BYTES),
               SYSTEM * each),
        _plain("8.4", "KV of five groups' examples", "B", (15.8e3, 2500 * TOKEN_BYTES),
               2500 * each),
        _plain("8.4", "KV of all shared prefixes", "B", (25.3e3, 4000 * TOKEN_BYTES),
               4000 * each),
        _plain("8.4", "the same with resume points", "B", (25.3e3, 4000 * TOKEN_BYTES),
               4000 * each + (1 + GROUPS) * model.layout.resume_point_bytes(),
               note="six positions"),
    ]  # fmt: skip


def _first_tokens() -> list[Line]:
    own = SHORT_TOKENS * TOKEN_FLOPS / (FLOPS / REQUESTS)
    return [
        _ranged("8.4", "first token of 2,000 tokens, A, in theory", "s", (3.25e-3, own),
                lambda c: c.engine.alone_s(0, SHORT_TOKENS),
                note="its formula, 16 PFLOP/s over 100, gives 325 ms; 3.25 ms is all 16 for one. "
                "Computed: alone in the engine"),
        _ranged("8.4", "first token, A, 'in practice' (30 to 60 ms)", "s", (45e-3, None),
                lambda c: c.first_token_s(False), note="computed: mean, all come at once"),
        _ranged("8.4", "first token, C, 'in practice' (10 to 20 ms)", "s", (15e-3, None),
                lambda c: c.first_token_s(True), note="computed: mean, all come at once"),
        _ranged("8.4", "first token is sooner by (60 to 70)", "%", (65, None),
                lambda c: 100 * (1 - c.first_token_s(True) / c.first_token_s(False))),
    ]  # fmt: skip


def _money() -> list[Line]:
    rent = GPUS * RENT.dollars_per_gpu_hour / 3600  # a second of the server
    prompt = LONG * LONG_TOKENS + SHORT * SHORT_TOKENS
    decode = per_million(rent, 6000)
    prefill_a, prefill_c = per_million(0.8 * rent, prompt), per_million(0.35 * rent, prompt)
    own_a = decode + per_million(0.8 * rent, REQUESTS * OUTPUT_TOKENS)
    own_c = decode + per_million(0.35 * rent, REQUESTS * OUTPUT_TOKENS)

    def saving(output: int) -> Callable[[Case], float]:
        return lambda c: 100 * (1 - c.both_dollars(True, output) / c.both_dollars(False, output))

    return [
        _plain("8.5", "an hour of the server", "$", (96, 8 * 12.0), 8 * case().device.usd_per_hour,
               note="computed: list price; below its $96 counts on both sides"),
        _ranged("8.5", "decode step of 100, in theory", "s", (0.16e-3,
                TOKEN_FLOPS * REQUESTS / FLOPS), lambda c: c.step_s(),
                note="arithmetic alone; a step reads nearly all experts"),
        _ranged("8.5", "tokens/s of one request (50 to 70)", "", (60, None),
                lambda c: 1 / c.step_s()),
        _ranged("8.5", "tokens/s of 100 requests", "", (6000, 100 * 60.0),
                lambda c: REQUESTS / c.step_s()),
        _ranged("8.5", "million tokens per hour", "", (21.6, 6000 * 3600 / 1e6),
                lambda c: REQUESTS / c.step_s() * 3600 / 1e6),
        _ranged("8.5", "decode, per million tokens", "$", (4.4, decode),
                lambda c: c.output_dollars()),
        _ranged("8.5", "prefill A, per million prompt tokens", "$", (prefill_a, prefill_a),
                lambda c: per_million(c.engine.dollars(c.prefill_s(False)), prompt), rebuilt=True),
        _ranged("8.5", "prefill C, per million prompt tokens", "$", (prefill_c, prefill_c),
                lambda c: per_million(c.engine.dollars(c.prefill_s(True)), prompt), rebuilt=True),
        _ranged("8.5", "A in all, per million generated (6 to 7)", "$", (6.5, own_a),
                lambda c: c.both_dollars(False, OUTPUT_TOKENS), rebuilt=True,
                note="its output length is lost: its totals hold at about 100 tokens a request"),
        _ranged("8.5", "C in all, per million generated (4.5 to 5.5)", "$", (5.0, own_c),
                lambda c: c.both_dollars(True, OUTPUT_TOKENS), rebuilt=True),
        _ranged("8.5", "C is cheaper by (20 to 25)", "%", (22.5, 100 * (1 - own_c / own_a)),
                saving(OUTPUT_TOKENS), rebuilt=True),
        _ranged("8.5", "C is cheaper by, at 1,000 tokens generated", "%", (22.5, None),
                saving(1000), note="the document's figure is for its own output length"),
    ]  # fmt: skip


def hand_off_s(model: Case, tokens: int = MEAN_TOKENS) -> float:
    """One request's state over PCIe at what that reaches, resume point included."""
    return model.layout.resume_bytes(tokens) / LINKS["PCIe-5-x16"].bytes_per_s
