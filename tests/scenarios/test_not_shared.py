"""Engines that claim one name and are not the same: visible before traffic, and never sharing."""

from __future__ import annotations

import msgspec
from harness import QUICK, FakeWorker, Product
from stub_publisher import BLOCK, block_tokens, stored


async def test_two_weights_under_one_name_never_share_and_it_is_said() -> None:
    async with FakeWorker("w1") as w1, FakeWorker("w2") as w2, FakeWorker("w3") as w3:
        configs = [
            w1.config(weights_digest="a"),
            w2.config(weights_digest="a"),
            w3.config(weights_digest="b"),
        ]
        async with Product(configs) as product:
            await product.settled()
            rows = await product.workers()
            assert rows["w1"]["fingerprint"] == rows["w2"]["fingerprint"]
            assert rows["w3"]["fingerprint"] != rows["w1"]["fingerprint"]
            assert [rows[w]["not_shared"] for w in ("w1", "w2")] == ["", ""]
            said = "'m': not with w1: weights_digest b, a"
            assert rows["w3"]["not_shared"] == said
            health = (await product.get("/health")).json()
            assert health["details"]["not_shared"] == {"w3": said}
            assert health["flags"] == []
            # what w1 announces for all who share its object store is w2's too, and not w3's
            w1.events.publish(stored("ABC", 3, medium="EXTERNAL"))
            w2.events.publish(stored("A", 1, medium="EXTERNAL"))
            w3.events.publish(stored("A", 1, medium="EXTERNAL"))
            await product.answers("ABC", {"w1": 3, "w2": 3, "w3": 1})


async def test_a_draft_head_that_appears_later_costs_a_block_and_all_older_claims() -> None:
    timing = msgspec.structs.replace(QUICK, describe_every_s=0.1)
    async with FakeWorker("w1") as w1, Product([w1.config()], timing=timing) as product:
        await product.settled()
        w1.events.publish(stored("ABC", 3))
        await product.answers("ABC", {"w1": 3})
        before = (await product.workers())["w1"]["fingerprint"]
        w1.draft = True

        async def noticed() -> bool:
            return (await product.workers())["w1"]["fingerprint"] != before

        await product.until(noticed)
        await product.answers("ABC", {})
        w1.events.publish(stored("ABC", 3))
        await product.answers("ABC", {"w1": 2})
        assert len(block_tokens("ABC")) == 3 * BLOCK
