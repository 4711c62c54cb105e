"""The page in a real browser: what is on it, that names stay names, and that it keeps its rules.

Skipped where there is no Chromium, or no playwright to drive it: `make browser` installs both.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from page_kit import ARGS, PAIRED, TIERED, Scene, scene

from kvatlas.cli.certs import make_token
from kvatlas.config import GatewayConfig
from kvatlas.config_tls import AdminConfig
from kvatlas.connectors.child import free_ports
from kvatlas.service.admin import Guard
from kvatlas.service.gateway import Gateway

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
try:
    from playwright.async_api import Browser, Page, async_playwright
except ImportError:
    pytest.skip("playwright is not installed: make browser", allow_module_level=True)
if not CHROMIUM:
    pytest.skip("there is no chromium here: make browser", allow_module_level=True)

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAIT_MS = 20_000
LIVE = "document.querySelector('#live').innerText"
FLAGS = "document.querySelector('#flags').innerText"
HOSTILE = "<img src=x onerror=alert(1)>"
ID = '"><script>document.title=1</script>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(folder: Path) -> AsyncIterator[Scene]:
    async with scene(folder, ("search", HOSTILE)) as made:
        made.product.assembly.page.period_s = 0.4
        await made.rounds(4)
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as play:
        running = await play.chromium.launch(executable_path=CHROMIUM, args=list(ARGS))
        yield running
        await running.close()


class Tab:
    """One window, and all that went wrong in it."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.faults: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", lambda m: self._said(m.type, m.text))
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("dialog", lambda dialog: self.faults.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))

    def _said(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.faults.append(text)

    async def open(self, path: str = "/kvatlas/") -> None:
        await self.page.goto(self.url + path)

    async def text(self, selector: str) -> str:
        found = self.page.locator(selector).first
        await found.wait_for(timeout=WAIT_MS)
        return await found.text_content() or ""

    async def until(self, script: str) -> None:
        """Asked from here: a policy without eval lets no driver wait within the page."""
        async with asyncio.timeout(WAIT_MS / 1000):
            while not await self.value(script):
                await asyncio.sleep(0.02)

    async def value(self, script: str) -> Any:
        return await self.page.evaluate(script)


@contextlib.asynccontextmanager
async def tab(browser: Browser, url: str, faults: tuple[str, ...] = (), **more: Any) -> Any:
    """Closed at the end, and nothing but ``faults`` may have gone wrong."""
    size = {"width": 1280, "height": 720}
    context = await browser.new_context(viewport=size, **more)
    made = Tab(await context.new_page(), url)
    try:
        yield made
    finally:
        await context.close()
    assert [f for f in made.faults if not any(known in f for known in faults)] == []
    assert made.hosts <= {url.split("/")[2]}, "it asked somebody else"


async def test_the_topology_is_live(stage: Scene, browser: Browser) -> None:
    async with tab(browser, stage.product.url) as tab_:
        await tab_.open()
        picture = await tab_.text("#topology svg")
        for name in ("node-a", "prefill-0", "decode-1", "qwen-2", "no agent", "objects", "dram"):
            assert name in picture, name
        assert await tab_.value("document.querySelectorAll('#topology .pair').length") >= 2
        assert await tab_.value("document.querySelectorAll('#topology .engine').length") == 8
        assert await tab_.value("document.querySelectorAll('#topology .link.store').length") == 2
        assert await tab_.value("document.querySelectorAll('#topology .engine.drains').length") == 1
        assert "8 of 8 engines are up" in await tab_.value(
            "document.querySelector('#topology svg').getAttribute('aria-label')"
        )
        await stage.workers[0].close()
        await tab_.until("document.querySelector('#topology .engine.down')")
        await tab_.until(
            "document.querySelector('#flags').innerText.includes('engine down qwen-0')"
        )
        await stage.workers[0].listen()
        await tab_.until("!document.querySelector('#topology .engine.down')")


async def test_counters_move_when_requests_are_served(stage: Scene, browser: Browser) -> None:
    async with tab(browser, stage.product.url) as tab_:
        await tab_.open()
        tile = "document.querySelector('[data-figure=Requests]').parentElement.innerText"
        await tab_.until(f"{tile}.includes('{stage.asked} since the start')")
        rows = "document.querySelectorAll('#requests tbody tr').length"
        await asyncio.gather(*(stage.turn(TIERED) for _ in range(5)))
        await tab_.until(f"{tile}.includes('{stage.asked} since the start')")
        assert await tab_.value(rows) == min(40, stage.asked)
        for chart in ("hits", "prices", "first"):
            assert await tab_.value(f"document.querySelectorAll('#{chart} svg .fill').length") > 0
        assert "hbm" in await tab_.text("#hits .legend")
        for part in ("#prefixes", "#tenants", "#pairs"):
            await tab_.until(f"document.querySelectorAll('{part} tbody tr').length > 0")


async def test_a_degraded_pair_is_seen(stage: Scene, browser: Browser) -> None:
    """Its state should come by RDMA, and no port of its node saw any."""
    async with tab(browser, stage.product.url) as tab_:
        await tab_.open()
        async with asyncio.timeout(5 * WAIT_MS / 1000):  # many hand-overs have to be seen
            while not await tab_.value("document.querySelector('#topology .pair.degraded')"):
                await stage.turn(PAIRED)
        await tab_.until(f"{FLAGS}.includes('decode-1')")
        assert "not rdma" in await tab_.text("#pairs")
        await tab_.until("document.querySelector('#status').innerText.includes('degraded')")


async def test_a_request_is_explained_as_a_picture(stage: Scene, browser: Browser) -> None:
    system = [7 + i for i in range(1024)]
    for _ in range(2):
        await stage.ask(TIERED, [*system, *stage.fresh(300)], "search", "explain-me")
    async with tab(browser, stage.product.url) as tab_:
        await tab_.open()
        await tab_.page.fill("#find-id", "explain-me")
        await tab_.page.press("#find-id", "Enter")
        assert "1,324 prompt tokens" in await tab_.text("#request .summary")
        rows = "document.querySelectorAll('#candidates tbody tr')"
        assert await tab_.value(f"{rows}.length") == 3
        assert await tab_.value(f"[...{rows}].filter(r => r.className === 'taken').length") == 1
        taken = "document.querySelector('#candidates .taken')"
        assert await tab_.value(f"{taken}.querySelectorAll('.real').length") == 1
        lines = await tab_.value(f"[...{taken}.querySelectorAll('svg')].map(s => s.ariaLabel)")
        assert re.match(r"resumes at 1,024 of 1,324 tokens; 1,024 from (hbm|dram)", lines[0])
        assert "recompute the rest" in lines[1]
        assert "1,024 tokens" in await tab_.text("#outcome")
        assert (await tab_.text("#as-text pre")).startswith("request explain-me: 1324 prompt")
        await tab_.page.go_back()
        await tab_.page.wait_for_selector("#topology svg", timeout=WAIT_MS)


async def test_an_unknown_request_is_told(stage: Scene, browser: Browser) -> None:
    async with tab(browser, stage.product.url, ("status of 404",)) as tab_:
        await tab_.open("/kvatlas/#request/none%20such")
        assert "no decision is kept for 'none such'" in await tab_.text("#request .summary")


async def test_names_from_outside_stay_text(stage: Scene, browser: Browser) -> None:
    await stage.ask(TIERED, stage.fresh(64), HOSTILE, ID)
    async with tab(browser, stage.product.url) as tab_:
        await tab_.open()
        await tab_.until("document.querySelector('#tenants tbody').innerText.includes('onerror')")
        link = tab_.page.locator("#requests a", has_text="<script>")
        await link.first.wait_for(timeout=WAIT_MS)
        assert await tab_.value("document.querySelectorAll('main img, main script').length") == 0
        await link.first.click()
        await tab_.until("document.querySelector('#request h1')?.innerText.includes('<script>')")
        assert await tab_.value("document.querySelectorAll('main img, main script').length") == 0
        assert await tab_.page.title() == "kvatlas"


async def test_no_markup_is_made_from_text_whatever_a_script_does(
    stage: Scene, browser: Browser
) -> None:
    """The policy holds in this browser: what slips through the page would be stopped by it."""
    broken = ("Trusted", "Content Security Policy", "connect")
    async with tab(browser, stage.product.url, broken) as tab_:
        await tab_.open()
        await tab_.text("#topology svg")
        for planted in (
            "document.body.innerHTML = '<b>x</b>'",
            "Reflect.construct(Function, ['return 1'])",
            "document.createElement('script').text = 'x = 1'",
        ):
            tried = f"try {{ {planted}; made(0); }} catch {{ made(1); }}"
            assert await tab_.value(f"new Promise(made => setTimeout(() => {{ {tried} }}))")
        with contextlib.suppress(Exception):
            await tab_.value("fetch('http://127.0.0.1:9/')")
        assert len(tab_.faults) >= 3


@pytest.mark.parametrize("width", [1280, 1024])
async def test_a_laptop_shows_all_of_it(stage: Scene, browser: Browser, width: int) -> None:
    async with tab(browser, stage.product.url) as tab_:
        await tab_.page.set_viewport_size({"width": width, "height": 720})
        newest = stage.product.assembly.log.newest(50)
        request = next(entry for entry in newest if entry.decision.plans)
        for path in ("/kvatlas/", f"/kvatlas/#request/{request.decision.id}"):
            await tab_.open(path)
            await tab_.until("document.querySelector('#topology svg, #candidates svg')")
            assert await tab_.value("document.documentElement.scrollWidth") <= width
            inner = "[...document.querySelectorAll('.wide')].filter(e => e.offsetParent)"
            hidden = f"{inner}.filter(e => e.scrollWidth > e.clientWidth + 1).length"
            if width >= 1280 or "request" in path:
                assert await tab_.value(hidden) == 0


async def test_light_and_dark(stage: Scene, browser: Browser) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    async with tab(browser, stage.product.url, color_scheme="dark") as tab_:
        await tab_.open()
        dark = await tab_.value(ground)
        assert sum(map(int, re.findall(r"\d+", dark))) < 150
        await tab_.page.click("#theme")  # auto → light
        light = await tab_.value(ground)
        assert sum(map(int, re.findall(r"\d+", light))) > 600
        await tab_.page.reload()
        assert await tab_.value(ground) == light  # what was chosen is kept
        await tab_.page.click("#theme")
        await tab_.page.click("#theme")  # dark → auto
        await tab_.page.emulate_media(color_scheme="light")
        assert await tab_.value(ground) == light


async def test_the_keyboard_is_enough(stage: Scene, browser: Browser) -> None:
    async with tab(browser, stage.product.url) as tab_:
        await tab_.open()
        await tab_.text("#topology svg")
        await tab_.page.keyboard.press("Tab")
        assert await tab_.value("document.activeElement.className") == "skip"
        await tab_.page.focus("#hits .plot")
        await tab_.page.keyboard.press("ArrowLeft")
        assert re.match(r"\d\d:\d\d:\d\d to ", await tab_.text("#hits .note"))
        assert "computed" in await tab_.value(
            "document.querySelector('#hits [aria-live]').innerText"
        )
        link = "document.querySelector('#requests tbody a')"
        await tab_.value(f"{link}.focus()")
        key = await tab_.value(f"{link}.dataset.key")
        await stage.turn(TIERED)  # the table is made anew under the reader's hands
        await tab_.until(f"{link}.dataset.key !== {key!r}")
        assert await tab_.value("document.activeElement.dataset.key") == key
        await tab_.page.keyboard.press("Enter")
        await tab_.page.wait_for_selector("#request h1", timeout=WAIT_MS)


async def test_a_browser_that_leaves_leaves_nothing(stage: Scene, browser: Browser) -> None:
    page, log = stage.product.assembly.page, stage.product.assembly.log
    async with tab(browser, stage.product.url) as tab_:
        await tab_.open()
        await tab_.text("#topology svg")
        assert (page.viewers, log.watcher) == (1, page)
        await tab_.page.click("#pause")
        await until(lambda: page.viewers == 0)
        await tab_.page.click("#pause")
        await until(lambda: page.viewers == 1)
    await until(lambda: page.viewers == 0)
    assert log.watcher is None
    assert page._history is None


async def test_the_page_comes_back_with_the_gateway(stage: Scene, browser: Browser) -> None:
    lost = ("ERR_", "Failed to load")
    (port,) = free_ports(1)
    async with AsyncExitStack() as stack:
        async with door(stage, port):
            tab_ = await stack.enter_async_context(tab(browser, f"http://127.0.0.1:{port}", lost))
            await tab_.open()
            await tab_.text("#topology svg")
        await tab_.until(f"{LIVE}.includes('connection lost')")
        async with door(stage, port):
            await tab_.until(f"{LIVE} === 'live'")
            await tab_.page.click("#pause")


async def test_it_asks_for_a_token_and_takes_no_other(
    stage: Scene, browser: Browser, folder: Path
) -> None:
    token, line = make_token("reader", "read")
    low, low_line = make_token("prom", "metrics")
    (folder / "tokens").write_text(f"{line}\n{low_line}\n")
    guard = Guard(AdminConfig(str(folder / "tokens")), closed=True)
    refused = ("status of 401", "status of 403")
    async with (
        door(stage, guard=guard) as gateway,
        tab(browser, f"http://127.0.0.1:{gateway.port}", refused) as tab_,
    ):
        await tab_.open()
        assert "for those who may read it" in await tab_.text("#door")
        assert "qwen" not in await tab_.page.content()
        for wrong, why in (("kva_wrong", "not taken"), (low, "has the right 'metrics'")):
            await tab_.page.fill("#token", wrong)
            await tab_.page.press("#token", "Enter")
            await tab_.until(f"document.querySelector('#door-why').innerText.includes({why!r})")
        await tab_.page.fill("#token", token)
        await tab_.page.press("#token", "Enter")
        await tab_.text("#topology svg")
        assert token not in await tab_.page.content()
        await tab_.page.reload()  # this tab knows it still
        await tab_.text("#topology svg")
        await tab_.page.click("#leave")
        assert "for those who may read it" in await tab_.text("#door")


@contextlib.asynccontextmanager
async def door(stage: Scene, port: int = 0, guard: Guard | None = None) -> Any:
    """Another one to the same product."""
    assembly = stage.product.assembly
    gateway = Gateway(
        GatewayConfig(port=port or free_ports(1)[0]),
        assembly.steering,
        pages=assembly.pages(),
        guard=guard,
    )
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.close()


async def until(met: Any) -> None:
    async with asyncio.timeout(WAIT_MS / 1000):
        while not met():
            await asyncio.sleep(0.005)
