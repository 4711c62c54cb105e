"""Resume records of a store that nodes share, where they lie in the cluster's register.

The bytes are in the store; which positions are whole is said in one place, changed in one step,
and for one *generation* of the store: a store that has lost all begins another, and whatever was
being written to the former counts no more. A register that does not answer costs hits, nothing
else. See `core.register`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence

from kvatlas.core import register_values as words
from kvatlas.core.forgetting import Floor, payer_of
from kvatlas.core.register_values import Answer, Question, Record
from kvatlas.errors import RegisterError
from kvatlas.service.register import RegisterPort
from kvatlas.service.tenant_limits import Limited

log = logging.getLogger(__name__)

ASKED_MAX = 256  # questions under way; beyond them there is no answer


class Records:
    """Of one store, for one agent. On the event loop."""

    def __init__(
        self,
        register: RegisterPort,
        store: str,
        deadline_s: float,
        *,
        counts: Counter[str],
        lost: Callable[[], None],
        limited: Limited | None = None,
    ) -> None:
        """``counts`` is counted in; ``lost`` is called where the store's content is another than
        this agent has believed; ``limited``: what tenants may have there, and for how long."""
        self.counts = counts
        self._register = register
        self._store = store
        self._deadline_s = deadline_s
        self._lost = lost
        self._limited = limited
        self._generation = 0  # none is known yet
        self._tasks: set[asyncio.Task[None]] = set()

    async def told(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The records of those positions that are whole; none where nobody answers."""
        found: dict[bytes, bytes] = {}
        for start in range(0, len(keys), words.COMMITS_MAX):
            some = tuple(keys[start : start + words.COMMITS_MAX])
            answer = await self._ask(words.AskRecords(self._store, some))
            if not isinstance(answer, words.ToldRecords) or self._moved_on(answer.generation):
                return {}
            found |= {k: data for k, data in zip(some, answer.data, strict=True) if data}
        return found

    def commit(self, records: Sequence[Record], done: Callable[[set[bytes]], None]) -> None:
        """Say that these are whole, of one owner; ``done`` with the keys that do not count."""
        if not self._start(self._commit(tuple(records), done)):
            done({record.key for record in records})

    async def _commit(
        self, records: tuple[Record, ...], done: Callable[[set[bytes]], None]
    ) -> None:
        bad = {record.key for record in records}
        try:
            if not self._generation:
                await self.told([records[0].key])
            for start in range(0, len(records), words.COMMITS_MAX):
                some = records[start : start + words.COMMITS_MAX]
                bad -= await self._committed(some)
        finally:
            done(bad)

    async def _committed(self, some: tuple[Record, ...]) -> set[bytes]:
        owner, limited = some[0].owner, self._limited
        ttl_ms, quotas = 0, {}
        if limited is not None:
            ttl_ms = round(limited.ttl_s(owner) * 1000)
            quotas = {tag: n for tag, n in limited.stored.items() if tag == payer_of(owner)}
        asked = words.Commit(self._store, self._generation, some, ttl_ms, quotas)
        answer = await self._ask(asked)
        if not isinstance(answer, words.Committed):
            return set()
        for why in answer.refused:
            self.counts[f"records_{why or 'committed'}"] += 1
        if self._moved_on(answer.generation):
            return set()
        return {r.key for r, why in zip(some, answer.refused, strict=True) if why is None}

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """These positions are not whole any more."""
        for start in range(0, len(keys), words.COMMITS_MAX):
            some = tuple(keys[start : start + words.COMMITS_MAX])
            self._start(self._then(words.Withdraw(self._store, some)))

    def expire(self) -> None:
        """The store has lost all that it held."""
        if self._generation:
            self._start(self._then(words.Expire(self._store, self._generation)))

    async def forget(self, floors: Sequence[Floor], keys: Sequence[bytes]) -> int:
        """Records that these floors mean go, and those of these positions; how many there are left.
        Raises RegisterError."""
        left = 0
        for start in range(0, len(keys), words.COMMITS_MAX):
            some = tuple(keys[start : start + words.COMMITS_MAX])
            await self._register.ask(words.Withdraw(self._store, some), self._deadline_s)
        for floor in floors:
            while True:
                asked = words.ForgetOwner(self._store, floor)
                answer = await self._register.ask(asked, self._deadline_s)
                if not isinstance(answer, words.Left) or not (answer.gone and answer.left):
                    break
            left += answer.left if isinstance(answer, words.Left) else 1
        return left

    async def close(self) -> None:
        """Ends what is asked."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- asking -----------------------------------------------------------------------------------

    async def _then(self, question: Question) -> None:
        answer = await self._ask(question)
        if isinstance(answer, words.Done):
            self._generation = max(self._generation, answer.revision)

    async def _ask(self, question: Question) -> Answer | None:
        try:
            answer = await self._register.ask(question, self._deadline_s)
        except RegisterError as error:
            self.counts["register_silent"] += 1
            log.info("%s", error)
            return None
        if isinstance(answer, words.Refused):
            self.counts[f"register_{answer.why}"] += 1
            return None
        return answer

    def _moved_on(self, generation: int) -> bool:
        """Whether the store's content is another one than was believed; then all is taken back."""
        known = self._generation
        if not known or generation == known:
            self._generation = generation
            return False
        self.counts["generations"] += 1
        if generation < known:  # a register that has lost all: it goes on from ours
            self.expire()
        else:
            self._generation = generation
        self._lost()
        return True

    def _start(self, work: Coroutine[object, object, None]) -> bool:
        if len(self._tasks) >= ASKED_MAX:
            self.counts["register_busy"] += 1
            work.close()
            return False
        task: asyncio.Task[None] = asyncio.create_task(work, name="records")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True
