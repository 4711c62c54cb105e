"""A model's KV state: its components, the groups in which an engine announces them, its costs.

A prefix can be resumed only where every required part of the state exists. Which parts there are,
how they are cut into blocks and how large they are follows from the model's config, the engine
and the dtype, and is written down here once.
"""

from __future__ import annotations

import enum
import hashlib

import msgspec


class Rule(enum.StrEnum):
    """How a component counts at a resume position p (DESIGN §2)."""

    CHAIN = "chain"  # every block up to p
    WINDOW = "window"  # only the blocks that cover the last W tokens before p
    OPTIONAL = "optional"  # its loss costs speed, not correctness


def round_up(value: int, step: int) -> int:
    """The smallest multiple of ``step`` that is not below ``value``."""
    return -(-value // step) * step


def _window_blocks(window_tokens: int, block_tokens: int) -> int:
    return max(1, -(-(window_tokens - 1) // block_tokens))


class Component(msgspec.Struct, frozen=True):
    """One kind of state, summed over the layers that carry it.

    ``block_tokens`` is the run of tokens that one stored block covers; ``stored_block_bytes`` what
    the engine keeps for it over all ``layers`` (padding included; a ring may keep fewer rows than
    the block has tokens), ``exact_bytes_per_token`` the logical bytes per token over all layers,
    before padding. ``group`` names the `Group` whose events announce it; "" means that the engine
    announces it nowhere, so that its presence is believed and not known (SGLang's windows).
    ``pool`` is the engine's own name of where it lies, "" where it has none (vLLM keeps all in
    one block pool and tells groups apart by index).

    ``least_blocks``: of a window, the last blocks that a resume on the grid really reads, where
    the engine keeps more; None where all of them are read, or nobody knows. It holds only where
    that was shown on the engine itself (`kvatlas.workload.proofs`).
    """

    name: str
    rule: Rule
    layers: int
    block_tokens: int
    stored_block_bytes: int
    exact_bytes_per_token: float
    window_tokens: int = 0
    group: str = ""
    pool: str = ""
    least_blocks: int | None = None

    def window_blocks(self, *, minimal: bool = False) -> int | None:
        """Blocks that must end at a resume position; None: all of them. ``minimal``: those that
        a resume on the grid reads."""
        if self.rule is Rule.CHAIN:
            return None
        if minimal and self.least_blocks is not None:
            return self.least_blocks
        return _window_blocks(self.window_tokens, self.block_tokens)

    def exact_block_bytes(self) -> float:
        """Bytes of one block before padding; of a ring, which keeps fewer rows, all it keeps."""
        return min(self.exact_bytes_per_token * self.block_tokens, float(self.stored_block_bytes))


class Group(msgspec.Struct, frozen=True):
    """What an engine stores, evicts and announces as one: the unit of the directory's claims.

    Identified on the wire by (kind, window, block size), never by index (V4 Flash and Pro swap
    theirs). ``copies`` groups may share one identity (V4 Flash has two sliding-window groups);
    those are told apart by index within one publisher only. ``kind`` "*" matches any.
    ``window_tokens`` None means `Rule.CHAIN`. ``lookahead``: blocks beyond p that the engine must
    find too, or it does not resume at p (0 or 1): with EAGLE, MTP or DSpark vLLM matches one block
    more and drops it (0.32, `eagle_proof_margin`).
    """

    name: str
    kind: str
    block_tokens: int
    window_tokens: int | None = None
    required: bool = True
    copies: int = 1
    lookahead: int = 0

    def window_blocks(self) -> int | None:
        """Blocks of this group that must end at a resume position; None: all of them.

        vLLM 0.32 `SlidingWindowManager`: cdiv(window - 1, block) contiguous blocks.
        """
        if self.window_tokens is None:
            return None
        return _window_blocks(self.window_tokens, self.block_tokens)

    def units(self, grid_tokens: int) -> int:
        """Blocks of this group inside one grid block that count for a resume at its end."""
        per_grid = grid_tokens // self.block_tokens
        blocks = self.window_blocks()
        return per_grid if blocks is None else min(per_grid, blocks)

    def span(self, grid_tokens: int) -> int | None:
        """Consecutive grid blocks, ending at p, that must be held for p; None: all up to p."""
        blocks = self.window_blocks()
        if blocks is None:
            return None
        return -(-blocks * self.block_tokens // grid_tokens)


class Compute(msgspec.Struct, frozen=True):
    """What prefilling costs, in floating-point operations.

    ``linear`` per token; ``attention`` per (query token, attended token) pair, over all layers,
    beyond the windowed layers, whose cost is constant per token and inside ``linear``. Above
    ``attended_max`` attended tokens a sparse indexer caps those pairs, and only ``scoring`` grows
    with the context: what every pair costs in any case (the indexer itself, and V4's HCA layers,
    which see all of their few entries).
    """

    linear: float
    attention: float
    attended_max: int | None = None
    scoring: float = 0.0

    def prefill_flops(self, start: int, end: int) -> float:
        """Operations to compute tokens start…end-1 when everything before start is cached."""
        if end <= start:
            return 0.0
        cap = self.attended_max
        pairs = (end * end - start * start) / 2
        seen = pairs
        if cap is not None:
            low, high = min(start, cap), min(end, cap)
            seen = (high * high - low * low) / 2 + cap * ((end - start) - (high - low))
        return self.linear * (end - start) + self.attention * seen + self.scoring * pairs


class Layout(msgspec.Struct, frozen=True):
    """All components of one model in one engine at one dtype.

    ``grid_tokens`` is the resume grid: every resume position is a multiple of it, and block keys
    are computed at that step. ``tensor_parallel`` is "replicated" (every rank holds all bytes: one
    rank writes, all ranks load or none) or "by_head" (each rank holds its KV heads' share of the
    bytes, which are counted here over all heads); "" where unknown. ``minimal_on`` is the digest of
    the engine, version and device that this is the layout of, where its minimal resume points were
    shown to be enough there (`kvatlas.workload.proofs.settled`); "" means that all is loaded.
    """

    model: str
    engine: str
    kv_dtype: str
    grid_tokens: int
    components: tuple[Component, ...]
    groups: tuple[Group, ...]
    compute: Compute | None = None
    tensor_parallel: str = ""
    minimal_on: str = ""

    def digest(self) -> str:
        """Hex digest of all that describes the state: part of the fingerprint.

        Not the model's name, which the fingerprint has beside it, not the cost, and not what was
        shown: the same bytes are read or not.
        """
        state = msgspec.json.encode(
            msgspec.structs.replace(self, model="", compute=None, minimal_on="")
        )
        return hashlib.sha256(b"kvatlas.layout.1\0" + state).hexdigest()[:16]

    def bytes_per_token(self) -> float:
        """Logical bytes that every further token of context adds (chain components only)."""
        return sum(c.exact_bytes_per_token for c in self.components if c.rule is Rule.CHAIN)

    def page_bytes_per_token(self) -> float:
        """The same as the engine stores it, padding included."""
        return sum(
            c.stored_block_bytes / c.block_tokens for c in self.components if c.rule is Rule.CHAIN
        )

    def resume_point_bytes(self, *, minimal: bool = False) -> int:
        """Fixed bytes of one resume position on the grid, as the engine stores them.

        ``minimal``: only those blocks that a resume reads. Only where exactness was shown with
        them may they be all that is stored or moved (`kvatlas.workload.proofs`).
        """
        return self._window_bytes(None, minimal=minimal)

    def has_minimal(self) -> bool:
        """Whether a resume is thought to read less than the engine keeps."""
        return any(c.least_blocks is not None for c in self.components)

    def state_digest(self) -> str:
        """Hex digest of what the parts are and which of their blocks a resume reads.

        Not of how many layers carry them: what was shown with a small model of a family holds for
        its large ones in the same engine.
        """
        parts = [
            (c.name, c.rule, c.block_tokens, c.window_tokens, c.least_blocks)
            for c in self.components
        ]
        state = msgspec.json.encode((self.engine, self.kv_dtype, self.grid_tokens, parts))
        return hashlib.sha256(b"kvatlas.state.1\0" + state).hexdigest()[:16]

    def asked_blocks(self, tokens: int) -> int:
        """Full grid blocks of a prompt that matter for a resume: one token must be computed, so
        the block that ends with the prompt does not, unless an engine that looks ahead only has
        to find it, and resumes before it."""
        ahead = any(g.lookahead for g in self.groups if g.required)
        return (tokens if ahead else max(tokens - 1, 0)) // self.grid_tokens

    def announced(self) -> bool:
        """Whether events tell of every part that a resume needs; else windows are believed."""
        return all(c.group or c.rule is Rule.OPTIONAL for c in self.components)

    def prefill_split(self, start: int, end: int) -> tuple[float, float]:
        """Operations to compute tokens start…end-1: those that do not depend on how much came
        before, and attention beyond the windows. Zeros where the cost is not known."""
        if self.compute is None or end <= start:
            return 0.0, 0.0
        fixed = self.compute.linear * (end - start)
        return fixed, self.compute.prefill_flops(start, end) - fixed

    def resume_bytes(self, tokens: int) -> int:
        """Stored bytes to move so that another engine can resume at ``tokens``; 0 at 0."""
        return self._resume_bytes(tokens, minimal=False)

    def load_bytes(self, tokens: int) -> int:
        """Stored bytes that this engine needs so that it can resume at ``tokens``: with the minimal
        resume point where that was shown to be enough on it."""
        return self._resume_bytes(tokens, minimal=bool(self.minimal_on))

    def _resume_bytes(self, tokens: int, *, minimal: bool) -> int:
        if tokens <= 0:
            return 0
        windows = self._window_bytes(tokens, minimal=minimal)
        return round(self.page_bytes_per_token() * tokens) + windows

    def resume_parts(self, tokens: int) -> dict[str, int]:
        """`resume_bytes` by component, those that are optional included."""
        if tokens <= 0:
            return {c.name: 0 for c in self.components}
        return {
            c.name: round(c.stored_block_bytes * tokens / c.block_tokens)
            if c.rule is Rule.CHAIN
            else _fitting_blocks(c, tokens) * c.stored_block_bytes
            for c in self.components
        }

    def group_bytes(self, name: str) -> int:
        """Stored bytes of what one grid block stands for in one copy of a group."""
        (group,) = [g for g in self.groups if g.name == name]
        units = group.units(self.grid_tokens)
        parts = [c for c in self.components if c.group == name]
        return sum(units * c.stored_block_bytes for c in parts) // group.copies

    def _window_bytes(self, tokens: int | None, *, minimal: bool = False) -> int:
        """Stored bytes of all windows that end at ``tokens``; None: far from the beginning."""
        total = 0
        for c in self.components:
            if c.rule is Rule.WINDOW:
                total += _fitting_blocks(c, tokens, minimal=minimal) * c.stored_block_bytes
        return total


def _fitting_blocks(part: Component, tokens: int | None, *, minimal: bool = False) -> int:
    """Blocks of a window that ends at ``tokens``: no more than there are before it."""
    blocks = part.window_blocks(minimal=minimal) or 0
    return blocks if tokens is None else min(blocks, -(-tokens // part.block_tokens))


def drafted(layout: Layout) -> Layout:
    """The same, run with a draft whose own state is not described: every group looks ahead.

    So does vLLM where it cannot tell which group holds the draft's layers (0.32,
    `KVCacheCoordinator`); where it can, this promises a block less than there is.
    """
    groups = tuple(msgspec.structs.replace(g, lookahead=1) for g in layout.groups)
    parts = tuple(msgspec.structs.replace(c, least_blocks=None) for c in layout.components)
    return msgspec.structs.replace(layout, groups=groups, components=parts, minimal_on="")


def plain(block_tokens: int, *, model: str = "", engine: str = "") -> Layout:
    """The layout of a model of which only the block size is known: one chain, unknown bytes."""
    group = Group(name="kv", kind="*", block_tokens=block_tokens)
    return Layout(
        model=model,
        engine=engine,
        kv_dtype="",
        grid_tokens=block_tokens,
        components=(),
        groups=(group,),
    )
