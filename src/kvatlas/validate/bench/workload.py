"""Which requests a bench plays: of a family by seed, or of a trace in windows.

Round by round other requests of the same kind (a trace's windows begin anew at its end), and for
all arms of a round the same. Round 0 of a
family is what `kvatlas trace generate` makes with the same seed, so the simulator can be given it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from kvatlas.errors import ConfigError
from kvatlas.workload.families import Family, generate, resized
from kvatlas.workload.trace import Trace, TraceRequest

_WARM_UP = 1_000_003  # seeds of warm-ups are far from those of rounds


class Workload:
    """``source``: a family, or an opened trace. What exceeds the context with its answer is left
    out, and counted by round in ``left_out``; a family's prompts are cut to fit. ``repeated``: a
    window was played in more than one round."""

    def __init__(self, name: str, source: Family | Trace, *, seed: int, output_max: int) -> None:
        self.name = name
        self.left_out: dict[int, int] = {}
        self.repeated = False
        self._source = source
        self._seed = seed
        self._output_max = output_max
        self._context_tokens: int | None = None
        self._total: int | None = None  # requests of a trace, once they were counted

    @property
    def block_tokens(self) -> int:
        return self._source.block_tokens

    def fit(self, context_tokens: int) -> None:
        """From now on prompts fit into this context, with their answers, and into each before."""
        context_tokens = min(context_tokens, self._context_tokens or context_tokens)
        self._context_tokens = context_tokens
        if isinstance(self._source, Family):
            room = max(1, context_tokens - self._output_max)
            least = min(self._source.context_max, room)
            self._source = msgspec.structs.replace(self._source, context_max=least)

    def seed_of(self, number: int) -> int:
        """What round ``number`` is drawn with."""
        return self._seed + number if isinstance(self._source, Family) else self._seed

    def requests(self, number: int, count: int) -> list[TraceRequest]:
        """Those of round ``number``, the first at 0 s. Raises ConfigError where there is none."""
        if isinstance(self._source, Family):
            trace = generate(resized(self._source, count), self.seed_of(number), self.name)
            return self._fitting(list(trace), number)
        windows = max(1, self._size() // count)
        self.repeated |= number >= windows
        start = number % windows * count
        return self._fitting(list(itertools.islice(self._source, start, start + count)), number)

    def warm_up(self, count: int) -> list[TraceRequest]:
        """A few requests of the kind, all at once."""
        if isinstance(self._source, Family):
            seed = self._seed + _WARM_UP
            found = self._fitting(list(generate(resized(self._source, count), seed, self.name)), 0)
        else:
            found = self._fitting(list(itertools.islice(self._source, count)), 0)
        return [msgspec.structs.replace(r, arrival_s=0.0, think_s=None) for r in found]

    def _size(self) -> int:
        if self._total is None:
            self._total = sum(1 for _ in self._source) if isinstance(self._source, Trace) else 0
        return self._total

    def _fitting(self, found: Sequence[TraceRequest], number: int) -> list[TraceRequest]:
        most = self._context_tokens
        kept = [r for r in found if most is None or r.input_tokens + self._output(r) <= most]
        self.left_out[number] = len(found) - len(kept)
        if not kept:
            fault = f"none fits into {most} tokens" if found else "there is none"
            raise ConfigError(f"{self.name}: no request for round {number + 1}: {fault}")
        first_s = kept[0].arrival_s
        return [
            msgspec.structs.replace(r, index=i, arrival_s=r.arrival_s - first_s)
            for i, r in enumerate(kept)
        ]

    def _output(self, request: TraceRequest) -> int:
        return max(1, min(request.output_tokens, self._output_max))


def own_rate(requests: Sequence[TraceRequest]) -> float | None:
    """Requests per second as they arrive; None where all come at once."""
    span_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    return (len(requests) - 1) / span_s if span_s > 0 else None


def time_scale(requests: Sequence[TraceRequest], rate: float) -> float:
    """What their times are multiplied by to come at ``rate`` per second. Raises ConfigError."""
    own = own_rate(requests)
    if own is None:
        raise ConfigError(
            "the requests all come at once: they have no rate to change (leave --rate and --knee)"
        )
    return own / rate
