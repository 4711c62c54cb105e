"""Planted bugs in the directory's books, in the questions to them, and in keys."""

from __future__ import annotations

from kvatlas.sim.planted_bug import Bug

_BOOKS = "core.directory:Directory"
_LOOKUP = "core.lookup:Lookup"

BUGS = (
    Bug(
        "clear-ignored",
        "resurrected",
        f"{_BOOKS}.apply",
        "the event that all blocks are gone is counted and nothing else",
        "self.reset(publisher)",
        "pass",
    ),
    Bug(
        "clear-then-dead-slot",
        "resurrected",
        f"{_BOOKS}.apply",
        "what follows a clear in its batch is filed under the life that just ended",
        "slot = self._slots[publisher]",
        "pass",
    ),
    Bug(
        "removed-for-all",
        "convergence",
        f"{_BOOKS}.clear",
        "a block that leaves one engine is taken from every engine",
        "self._store(book, key, mask & ~slot.bit)",
        "self._store(book, key, 0)",
    ),
    Bug(
        "sum-not-lowered",
        "ledger-sums",
        f"{_BOOKS}.clear",
        "the count over all publishers only rises",
        "self.holders -= 1",
        "pass",
    ),
    Bug(
        "sum-survives-life",
        "ledger-sums",
        f"{_BOOKS}._retire",
        "the blocks of a life that ended stay in the count over all",
        "self.holders -= slot.holders",
        "pass",
    ),
    Bug(
        "duplicate-counts",
        "ledger-sums",
        f"{_BOOKS}.set",
        "a block that is held already counts again",
        "if mask & slot.bit:\n        return True",
        "if mask & slot.bit and slot.muted:\n        return True",
    ),
    Bug(
        "either-limit",
        "bounds",
        f"{_BOOKS}.set",
        "only where both limits are reached a claim is refused",
        "limits.holders_max or slot.holders",
        "limits.holders_max and slot.holders",
    ),
    Bug(
        "one-too-many",
        "bounds",
        f"{_BOOKS}.set",
        "a publisher may hold one block more than its limit",
        "slot.holders >= limits.holders_per_publisher_max",
        "slot.holders > limits.holders_per_publisher_max",
    ),
    Bug(
        "doubt-forgotten",
        "over-promise",
        f"{_BOOKS}.reset",
        "a clear in the history that is replayed ends the doubt in it",
        "self.believe(publisher, not slot.doubted)",
        "self.believe(publisher, True)",
    ),
    Bug(
        "bit-freed-early",
        "resurrected",
        f"{_BOOKS}._retire",
        "the bit of a life that ended is given out before it is swept, and once more after",
        "self._retired.append((bit, slot.claims.held_keys()))",
        "self._retired.append((bit, slot.claims.held_keys())); self._free_bits.append(bit)",
    ),
    Bug(
        "shared-not-swept",
        "resurrected",
        f"{_BOOKS}.sweep",
        "the sweep clears only what nobody else holds",
        "if mask & bit:",
        "if mask == bit:",
    ),
    Bug(
        "gone-but-listed",
        "leak",
        f"{_BOOKS}.unregister",
        "the claims of an engine that changed its model stay in the old pool",
        "self._retire(slot)",
        "pass",
    ),
    Bug(
        "mute-ignored",
        "over-promise",
        f"{_BOOKS}._mute",
        "an engine with groups that its layout does not have is noted and believed",
        "slot.pool.alive &= ~slot.bit",
        "pass",
    ),
    Bug(
        "believed-though-muted",
        "over-promise",
        f"{_BOOKS}.believe",
        "the end of a replay makes a muted engine count again",
        "if believed and not slot.muted:",
        "if believed:",
    ),
    Bug(
        "chain-one-further",
        "over-promise",
        f"{_LOOKUP}._chains",
        "the first block that is missing counts as held",
        "near[start] = lost",
        "near[start + 1] = lost",
    ),
    Bug(
        "window-one-short",
        "over-promise",
        f"{_LOOKUP}._hole",
        "the first block of a long window is not looked at",
        "last - (lane.span or 0)), -1)",
        "last - (lane.span or 0) + 1), -1)",
    ),
    Bug(
        "window-of-next-block",
        "over-promise",
        f"{_LOOKUP}._deepest",
        "the window at the block after the position is looked at",
        "pool.short, keys[position - 1], tiers",
        "pool.short, keys[min(position, len(keys) - 1)], tiers",
    ),
    Bug(
        "one-lane-enough",
        "over-promise",
        f"{_LOOKUP}._held",
        "only the last of several groups decides",
        "among &= self._books[lane][tiers[0]].get(key, 0)",
        "among = self._books[lane][tiers[0]].get(key, 0)",
    ),
    Bug(
        "last-token-counts",
        "over-promise",
        "core.layout:Layout.asked_blocks",
        "a prompt that ends with a block is resumed at its very end",
        "max(tokens - 1, 0)",
        "tokens",
    ),
    Bug(
        "root-without-adapter",
        "over-promise",
        "core.keys:Keyring.root",
        "keys do not bind the adapter",
        "[scope.kind, scope.id, adapter]",
        "[scope.kind, scope.id]",
    ),
    Bug(
        "tenants-are-one",
        "cross-scope",
        "core.keys:Keyring.root",
        "keys bind that there is a tenant, not which",
        "[scope.kind, scope.id, adapter]",
        "[scope.kind, adapter]",
    ),
    Bug(
        "key-skips-a-token",
        "over-promise",
        "core.keys:Keyring.chain",
        "the last token of a block does not enter its key",
        "return native.chain(self._secret, parent, tokens, size)",
        "whole = bytes(tokens)\n"
        "        tokens = b''.join(whole[i : i + size - 4] + bytes(4)\n"
        "            for i in range(0, len(whole) - size + 1, size))\n"
        "        return native.chain(self._secret, parent, tokens, size)",
    ),
    Bug(
        "key-without-order",
        "over-promise",
        "core.keys:Keyring.chain",
        "tokens of a block enter its key sorted",
        "return native.chain(self._secret, parent, tokens, size)",
        "words = memoryview(bytes(tokens)).cast('I')\n"
        "        tokens = b''.join(b''.join(w.to_bytes(4, 'little')\n"
        "            for w in sorted(words[i : i + block_tokens]))\n"
        "            for i in range(0, len(words), block_tokens))\n"
        "        return native.chain(self._secret, parent, tokens, size)",
    ),
)
