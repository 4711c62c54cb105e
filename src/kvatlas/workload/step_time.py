"""How long one step of the engine model takes, from what it computes, reads and exchanges. Pure.

A step is a chain of kernels, so its time is a sum, and inside each part the slower of arithmetic
and memory counts (Williams et al., "Roofline", CACM 2009):

    weights     max(operations / FLOP/s, bytes read / bandwidth)      once per step, and the
                ``unhidden`` share of the smaller: near the ridge neither hides the other
    attention   max(operations / FLOP/s, state read / bandwidth)      per request
    exchange    two collectives per layer (Megatron-LM, arXiv 1909.08053)
    fixed       per step, per layer and per request: scheduling, launches, sampling

What is reached of the peak rates, and the fixed costs, belong to the `Device`; they are
assumptions until `kvatlas validate calibrate` has fitted them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from functools import lru_cache
from operator import add

from kvatlas.core.layout import Layout
from kvatlas.workload.device import STEP_S
from kvatlas.workload.shape import width_bytes
from kvatlas.workload.spec import EngineSpec

_Lines = tuple[float, float, float, float]
_EXCHANGES_PER_LAYER = 2  # after attention and after the feed-forward part
_ACTIVATION_BYTES = 2  # bf16


class StepTime:
    """Seconds that one step takes, from its work. Pure arithmetic on an `EngineSpec`.

    It never shrinks when work is added: a batch takes at least as long as each of its parts.
    """

    def __init__(self, spec: EngineSpec, layout: Layout) -> None:
        spec.check(layout)
        self._scale = spec.time_scale
        self._prefill_rate = spec.prefill_tokens_per_s
        self._decode_step_s = spec.decode_step_s or 0.0
        own = spec.step_overhead_s
        self._step_s = STEP_S if own is None else own
        self._token_s = self._request_s = 0.0
        self._alone = array("d")
        if self._prefill_rate is None:
            self._from_device(spec, layout)

    def _from_device(self, spec: EngineSpec, layout: Layout) -> None:
        device, compute = spec.device, layout.compute
        assert device is not None
        assert compute is not None
        self._compute = compute
        many = spec.devices
        self._flops = device.compute_rate(spec.precision) * many
        self._attention_flops = device.attention_rate() * many
        self._bytes_per_s = device.memory_rate() * many
        # Where every device holds all of the state, each reads all of it.
        split = 1 if layout.tensor_parallel == "replicated" else many
        self._state_bytes_per_s = device.state_rate() * split
        pair = compute.attention + compute.scoring
        self._scored_share = compute.scoring / pair if pair else 0.0
        self._bytes_per_token = layout.page_bytes_per_token()
        self._fixed_bytes = layout.resume_point_bytes()
        self._unhidden = device.unhidden
        self._weights(spec)
        self._decode_lines()
        self._request_s = device.request_s
        if spec.step_overhead_s is None:
            self._step_s = device.step_s
        if spec.shape is not None:
            self._step_s += spec.shape.layers * device.layer_s
            self._exchange(spec)

    def _weights(self, spec: EngineSpec) -> None:
        """Bytes that every step reads, and those of which each token picks a share by itself."""
        width, shape = width_bytes(spec.precision), spec.shape
        if shape is None:  # all that is not active is taken for experts that nobody chose
            active = self._compute.linear / 2 * width
            self._always_bytes, self._routed_bytes = 0.0, max(active, spec.weight_bytes)
            self._idle_share = 1 - active / self._routed_bytes
            self._head_flops = 0.0
        else:
            self._always_bytes = (shape.dense(self._compute) + shape.head) * width
            self._routed_bytes = shape.routed * width_bytes(spec.expert_precision or spec.precision)
            self._idle_share = 1 - shape.routed_share
            self._head_flops = 2.0 * shape.head
        self._ranks = spec.expert_ranks

    def _exchange(self, spec: EngineSpec) -> None:
        """Ring all-reduce: every device sends 2(n-1)/n of the activations; a latency each."""
        device, shape = spec.device, spec.shape
        assert device is not None
        assert shape is not None
        together = spec.devices * spec.expert_ranks
        if together == 1:
            return
        exchanges = _EXCHANGES_PER_LAYER * shape.layers
        self._step_s += exchanges * device.link_latency_s
        sent = 2 * (together - 1) / together * shape.hidden * _ACTIVATION_BYTES
        self._token_s = exchanges * sent / device.link_bytes_per_s

    def _decode_lines(self) -> None:
        """Attention of a single token behind s others, in seconds: the larger of two lines in s,
        arithmetic (slope, at 0) and memory (slope, at 0), before and beyond ``attended_max``."""
        compute, flops, rate = self._compute, self._attention_flops, self._state_bytes_per_s
        pair, read = compute.attention + compute.scoring, self._bytes_per_token
        near = (pair / flops, pair / 2 / flops, read / rate, self._fixed_bytes / rate)
        self._near = self._far = near
        cap = compute.attended_max
        self._cap = float("inf") if cap is None else cap
        if cap is not None:
            share = self._scored_share
            fixed = cap * (1 - share) * read + self._fixed_bytes
            above = cap * compute.attention + compute.scoring / 2
            self._far = (compute.scoring / flops, above / flops, share * read / rate, fixed / rate)
        self._alone = _alone(self._cap, self._near, self._far)

    def seconds(self, work: list[tuple[int, int]]) -> float:
        """Duration of a step that computes tokens start…end-1 for each (start, end).

        Each token picks its experts independently of the others; the engine ranks that share
        them are as busy as this one. Beyond ``attended_max`` tokens a sparse attention reads only
        the share of a request's state that scoring costs of a full pair.
        """
        if self._prefill_rate is not None:
            prefill = sum(end - start for start, end in work if end - start > 1)
            decode = any(end - start == 1 for start, end in work)
            seconds = prefill / self._prefill_rate + (self._decode_step_s if decode else 0.0)
            return (seconds + self._step_s) * self._scale
        tokens = 0
        attention = 0.0
        for start, end in work:
            tokens += end - start
            attention += self._attention(start, end)
        return self._total(tokens, len(work), attention)

    def alike(self, start: int, count: int, chunk: tuple[int, int] | None = None) -> float:
        """`seconds` of a step in which ``count`` requests compute one token behind ``start``
        others each, and perhaps one more computes ``chunk`` of its prompt."""
        if self._prefill_rate is not None or count + bool(chunk) < 1:
            return self.seconds([*[(start, start + 1)] * count, *([chunk] if chunk else [])])
        attention = count * self._attention(start, start + 1) if count else 0.0
        if chunk is None:
            return self._total(count, count, attention)
        attention += self._attention(*chunk)
        return self._total(count + chunk[1] - chunk[0], count + 1, attention)

    def _total(self, tokens: int, requests: int, attention: float) -> float:
        seconds = self._linear(tokens, requests) + attention + tokens * self._token_s
        return (seconds + self._step_s + requests * self._request_s) * self._scale

    def run(self, starts: Sequence[int], steps: int) -> list[float]:
        """`seconds` of each of ``steps`` steps in a row in which every request computes one token
        and is one further than before, from ``starts`` on. To the bit what that gives."""
        if self._prefill_rate is not None:
            return [self.seconds([(0, 1)])] * steps
        total: Sequence[float] = ()
        for start in starts:
            end = start + steps
            if len(self._alone) < end:
                _reach(self._alone, end, self._cap, self._near, self._far)
            each = self._alone[start:end]
            total = list(map(add, total, each)) if total else each
        count = len(starts)
        linear, exchange = self._linear(count, count), count * self._token_s
        fixed, requests, scale = self._step_s, count * self._request_s, self._scale
        return [(linear + each + exchange + fixed + requests) * scale for each in total]

    def _linear(self, tokens: int, requests: int) -> float:
        """Everything that multiplies activations by weights: projections, experts, the head."""
        flops = tokens * self._compute.linear + requests * self._head_flops
        touched = 1.0 - self._idle_share ** (tokens * self._ranks)
        read = self._always_bytes + self._routed_bytes * touched / self._ranks
        short, long = sorted((flops / self._flops, read / self._bytes_per_s))
        return long + short * self._unhidden

    def _attention(self, start: int, end: int) -> float:
        """Scores and values over the request's state, which is read once."""
        if end - start == 1:
            a, b, c, d = self._near if start < self._cap else self._far
            return max(a * start + b, c * start + d)
        compute = self._compute
        flops = compute.prefill_flops(start, end) - compute.linear * (end - start)
        cap = compute.attended_max
        seen: float = start
        if cap is not None and start > cap:
            seen = cap + (start - cap) * self._scored_share
        read = seen * self._bytes_per_token + self._fixed_bytes
        return max(flops / self._attention_flops, read / self._state_bytes_per_s)


@lru_cache(maxsize=64)
def _alone(cap: float, near: _Lines, far: _Lines) -> array[float]:
    """Attention of a single token by how many there are before it: one growing table for all
    engines that are alike."""
    return array("d")


def _reach(alone: array[float], end: int, cap: float, near: _Lines, far: _Lines) -> None:
    """Fill such a table up to ``end`` tokens before it."""
    for (a, b, c, d), stop in ((near, cap), (far, math.inf)):
        part = range(len(alone), int(min(end, stop)))
        alone.extend([x if (x := a * s + b) > (y := c * s + d) else y for s in part])
