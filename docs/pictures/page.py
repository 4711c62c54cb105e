"""Makes the pictures of guides/page.md: `make pictures`.

Chromium looks at a gateway before stub engines and agents (`tests/integration/page_kit.py`), to
which clients have sent requests in rounds; its clock is moved on by five seconds from one round to
the next, so that ten minutes take one. All figures are of those requests.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

import uvloop
from playwright.async_api import Browser, async_playwright

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "integration"))
from page_kit import ARGS, Scene, scene

HERE = Path(__file__).resolve().parent
ROUNDS = 112
SIZE = {"width": 1280, "height": 800}
SHARP = 1.25
UPPER = {"x": 0, "y": 0, "width": 1280, "height": 1640}  # of the overview: tables go on below


async def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("there is no chromium here: make browser")
    with tempfile.TemporaryDirectory() as folder:
        async with scene(Path(folder), ("search", "support", "research")) as stage:
            await stage.rounds(ROUNDS)
            async with async_playwright() as play:
                browser = await play.chromium.launch(executable_path=chromium, args=list(ARGS))
                for scheme in ("light", "dark"):
                    await draw(stage, browser, scheme)
                await browser.close()


async def draw(stage: Scene, browser: Browser, scheme: str) -> None:
    """The overview, and the explanation of one whose plans differ."""
    context = await browser.new_context(
        viewport=SIZE, color_scheme=scheme, device_scale_factor=SHARP
    )
    page = await context.new_page()
    stage.product.assembly.page.period_s = 0.2
    await page.goto(f"{stage.product.url}/kvatlas/")
    await page.locator("#topology svg").wait_for()
    await stage.rounds(8)  # so that prefixes and tenants are seen
    await asyncio.sleep(2 * stage.product.assembly.page.period_s)
    await page.screenshot(path=HERE / f"page-{scheme}.png", full_page=True, clip=UPPER)
    await page.goto(f"{stage.product.url}/kvatlas/#request/{stage.telling()}")
    await page.locator("#candidates svg").first.wait_for()
    await page.screenshot(path=HERE / f"page-explain-{scheme}.png", full_page=True)
    await context.close()


if __name__ == "__main__":
    uvloop.run(main())
