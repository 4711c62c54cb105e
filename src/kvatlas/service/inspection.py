"""What the directory knows, for people: how much is held where, and what of one prompt.

Reading only: nothing here routes, counts or changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvatlas.core.directory import Directory
from kvatlas.core.layout import Layout
from kvatlas.core.lookup import Positions
from kvatlas.core.records import Publisher
from kvatlas.service.salts import KeysOf
from kvatlas.service.steer import Inbound
from kvatlas.service.steering import KEYED_PATHS, Rank, Steering


def sizes(directory: Directory) -> dict[str, object]:
    """Per publisher, group and tier: complete grid blocks, and the bytes that they stand for.

    A block of a windowed group is one window that ends on the grid. Bytes are 0 where the layout
    does not tell them (a plain block size).
    """
    found: dict[str, object] = {}
    for publisher in directory.publishers():
        pool = directory.pool_of(publisher)
        assert pool is not None
        found[str(publisher)] = {
            group: {
                tier.name.lower(): {
                    "blocks": count,
                    "bytes": count * pool.layout.group_bytes(group),
                }
                for tier, count in tiers.items()
            }
            for group, tiers in directory.held(publisher).items()
        }
    return found


class Inspector:
    """Answers what a request would find, for each engine that serves its model."""

    def __init__(self, steering: Steering, directory: Directory) -> None:
        self._steering = steering
        self._directory = directory

    async def inspect(self, request: Inbound) -> dict[str, object]:
        """``request.body`` as for the API: ``prompt`` or ``messages``, ``model``, ``cache_salt``.

        Its ``worker``, where given, leaves out the others; with ``keys`` the block keys are told,
        too. Raises RequestError as the API does.
        """
        path = KEYED_PATHS[0] if "messages" in request.body else KEYED_PATHS[1]
        only = request.body.pop("worker", None)
        told = request.body.pop("keys", False) is True
        asked = Inbound(request.id, path, request.body, request.headers)
        prompt, found = await self._steering.looked_up(asked)
        workers = {
            str(rank.publisher): self._of(rank, keys)
            | ({"keys": [key.hex() for key in keys.below]} if told else {})
            for rank, keys in found
            if only in (None, str(rank.publisher))
        }
        return {"prompt_tokens": prompt.count, "unkeyed": prompt.reason, "workers": workers}

    def _of(self, rank: Rank, keys: KeysOf) -> dict[str, object]:
        where = self._directory.positions(rank.publisher, keys.engine, keys.below)
        if where is None:
            return {}
        return {
            **_shown(where, rank.layout),
            "resume_point": resume_point(rank.layout, rank.resume_point),
            "believed": not rank.layout.announced(),
            "confidence": self._confidence(rank.publisher),
        }

    def _confidence(self, publisher: Publisher) -> float:
        gap = self._steering.gaps.get(publisher)
        return round(gap.confidence(), 3) if gap else 1.0


def resume_point(layout: Layout, why: str) -> dict[str, object]:
    """Which resume point counts for what this engine loads, its bytes, and why that one."""
    minimal = bool(layout.minimal_on)
    return {
        "minimal": minimal,
        "bytes": layout.resume_point_bytes(minimal=minimal),
        "why": why,
    }


def _shown(where: Positions, layout: Layout) -> dict[str, object]:
    """Positions as runs [first, last] on the grid; bytes by component at the deepest one."""
    deepest = where.deepest()
    return {
        "resume_tokens": deepest,
        "resume_grid_tokens": layout.grid_tokens,
        "positions": {
            "hbm": _runs(where.hbm, layout.grid_tokens),
            "lower": _runs(where.lower, layout.grid_tokens),
        },
        "chain_tokens": {"hbm": where.chain_tokens, "with_lower": where.lower_chain_tokens},
        "bytes": layout.resume_parts(deepest),
        "missing": [{"tokens": at, "groups": list(names)} for at, names in where.missing],
    }


def _runs(positions: Sequence[int], grid: int) -> list[list[int]]:
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][1] + grid == position:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    return runs
