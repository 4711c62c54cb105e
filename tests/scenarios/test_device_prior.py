"""``[router] device``: for whose first prices it does not count is said."""

from __future__ import annotations

from harness import FakeWorker, Product

from kvatlas.config import RouterConfig


async def test_a_model_of_unknown_operations_is_named() -> None:
    async with FakeWorker("plain") as plain, FakeWorker("known") as known:
        configs = [plain.config(), known.config(layout="llama-3.1-8b")]
        router = RouterConfig(device="H20", precision="bf16")
        async with Product(configs, router=router) as product:
            await product.settled()
            health = (await product.get("/health")).json()
            assert list(health["details"]["device_unused"]) == ["plain"]
            assert health["flags"] == []
        async with Product(configs) as product:
            await product.settled()
            assert "device_unused" not in (await product.get("/health")).json()["details"]
