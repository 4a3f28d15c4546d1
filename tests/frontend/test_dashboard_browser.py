"""The dashboard in Chromium: what it shows of a model that switches, its keys, its looks, and how it survives.

Needs Debian's package chromium. The pictures of a run are in its tmp_path.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from splash_engines.build import build_engine
from tests.e2e.servers import MODEL, Server
from tests.frontend import chromium
from tests.frontend.chromium import Page
from tests.frontend.fake_engine import FakeEngine, ready_message
from tests.frontend.servers import FrontendProcess, start_frontend, wait_until_ready

pytestmark = pytest.mark.nightly

TAB, ENTER, SPACE = ("Tab", 9), ("Enter", 13), (" ", 32)
LAYOUT = "document.querySelector('#now-layout .chip')?.textContent"
TEXT = "document.getElementById('{}').textContent"
FOCUSED = """(() => {
  const node = document.activeElement;
  const box = getComputedStyle(node.matches('.choice input') ? node.nextElementSibling : node);
  const name = node.matches('.choice input') ? node.value : node.id || node.dataset.layout || node.className;
  return [name || node.tagName, box.outlineStyle !== 'none' && parseFloat(box.outlineWidth) >= 2];
})()"""
OVERFLOWING = """(() => {
  const width = document.documentElement.clientWidth;
  const out = [...document.querySelectorAll('body *')].filter((node) => {
    const box = node.getBoundingClientRect();
    const most = (node.parentElement.closest('.card')?.getBoundingClientRect().right ?? width) + 0.5;
    return box.width > 1 && (box.right > most || box.left < -0.5) && !node.closest('.skip, .unseen, thead');
  });
  return [document.documentElement.scrollWidth - width, ...out.map((node) => node.tagName + '.' + node.className)];
})()"""
# Texts whose contrast with what is behind them is below WCAG's 4.5, by the formula of its relative luminance.
LOW_CONTRAST = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (c) => c.slice(0, 3).map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const c = rgb(getComputedStyle(node).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest('.unseen, noscript')) continue;
    const style = getComputedStyle(node);
    const isDrawn = node instanceof SVGElement;
    const back = isDrawn && node.previousElementSibling?.tagName === 'rect' && node.classList.contains('band-name')
      ? rgb(getComputedStyle(node.previousElementSibling).fill) : behind(node);
    const [a, b] = [light(rgb(isDrawn ? style.fill : style.color)), light(back)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push(`${node.tagName} ${node.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return low;
})()"""


async def press_until(page: Page, name: str) -> list[str]:
    """Tab until that has the focus; the names on the way. Each must show that it has it."""
    names: list[str] = []
    while not names or names[-1] != name:
        await page.press(*TAB)
        focused, is_shown = await page.evaluate(FOCUSED)
        assert is_shown, f"nobody sees that {focused} has the focus"
        names.append(focused)
        assert len(names) < 30, names
    return names


def check_tree(nodes: list[dict[str, Any]]) -> None:
    for node in nodes:
        if node["role"] in (
            "button",
            "radio",
            "progressbar",
            "image",
            "textbox",
            "table",
            "DisclosureTriangle",
            "group",
        ):
            assert node["name"] or node["role"] in ("table", "group"), node
    named = {(node["role"], node["name"]) for node in nodes}
    for layout in ("TP", "DP", "CP", "DOP"):
        assert ("button", f"Switch to {layout}") in named, named
    assert ("image", "Timeline") in named and ("heading", "Recent switches") in named
    roles = [node["role"] for node in nodes]
    for role in ("main", "banner", "status", "log", "table", "columnheader", "rowheader", "cell"):
        assert role in roles, role


@asynccontextmanager
async def load(server: Server) -> Any:
    """Requests one after the other on a few connections, until it ends."""
    ended = False

    def send(number: int) -> None:
        body = {"prompt": list(range(10, 40 + number)), "max_tokens": 60, "ignore_eos": True}
        while not ended:
            with suppress(OSError, http.client.HTTPException):
                server.ask("POST", "/v1/completions", body)

    tasks = [asyncio.create_task(asyncio.to_thread(send, number)) for number in range(6)]
    try:
        yield
    finally:
        ended = True
        await asyncio.gather(*tasks)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    build_engine(MODEL, tmp_path / "engine")
    flags = ("--engine", str(tmp_path / "engine"), "--dtype", "float32", "--memory", "64M", "--name", "splash-tiny")
    server = Server("supervised", 2, flags)
    try:
        yield server.wait_until_ready()
    finally:
        server.close()


def test_a_model_that_switches(server: Server, tmp_path: Path) -> None:
    async def drive(page: Page) -> None:
        await page.look(width=1200)
        await page.open(f"{server.url}/dashboard")
        async with load(server):
            await page.until(f"{LAYOUT} === 'TP' && {TEXT.format('now-running')} === '6'")
            assert await press_until(page, "release") == [
                "skip", "600", "SUMMARY", "tp", "dp", "cp", "dop", "pin", "release",
            ]  # fmt: skip
            await page.press(*TAB, shift=True)
            await page.press(*ENTER)  # pins it, so that nothing but this test switches
            await page.until(f"{TEXT.format('now-layout')} === 'TPpinned'")
            for layout in ("dop", "cp", "dp"):
                await page.press(*TAB, shift=True)
                assert (await page.evaluate(FOCUSED))[0] == layout
                await page.press(*(SPACE if layout == "cp" else ENTER))
                await page.until(f"{LAYOUT} === '{layout.upper()}'")
                assert (await page.evaluate(FOCUSED))[0] == layout, "the focus stays where it was"
            await page.until("document.querySelectorAll('#switches .outcome.good').length === 3")
            said = await page.evaluate(TEXT.format("events"))
            for sentence in ("TP to DOP, committed", "DOP to CP, committed", "CP to DP, committed"):
                assert sentence in said
            await check_looks(page, tmp_path)
            check_tree(await page.accessible())
            await press_until(page, "release")
            await page.press(*ENTER)
            await page.until(f"{TEXT.format('asked')} === 'The layout follows the load again.'")
            await page.until(f"{TEXT.format('now-layout')}.endsWith('auto')")
        assert page.problems == []
        server.process.terminate()
        await page.until(f"{TEXT.format('connection')}.startsWith('Not connected, retrying')")

    chromium.run(drive)


async def check_looks(page: Page, folder: Path) -> None:
    await page.evaluate("document.querySelector('input[value=\"120\"]').click()")
    await page.evaluate("document.querySelector('summary').click()")
    for name, width, dark in (
        ("light", 1200, False),
        ("dark", 1200, True),
        ("phone", 360, False),
        ("night", 360, True),
    ):
        await page.look(width=width, height=800, dark=dark)
        await page.until(f"document.querySelector('#chart svg').width.baseVal.value < {width}")
        assert await page.evaluate(OVERFLOWING) == [0], name
        assert await page.evaluate(LOW_CONTRAST) == [], name
        await page.screenshot(folder / f"{name}.png")
        assert (folder / f"{name}.png").stat().st_size > 20_000
    await page.evaluate("document.querySelector('summary').click()")
    await page.look(width=1200)


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="splash-") as folder:
        yield f"ipc://{folder}/link"


def with_fake(address: str, drive: Callable[[Page, FakeEngine, FrontendProcess], Awaitable[None]], *flags: str) -> None:
    engine = FakeEngine(address, ready_message(400))
    engine.start()
    frontend = start_frontend(address, "--keep-engine", *flags)
    try:
        wait_until_ready(frontend)
        chromium.run(lambda page: drive(page, engine, frontend))
    finally:
        frontend.end()
        engine.stop()


def test_a_key_is_asked_for_once_and_kept_in_the_tab(address: str) -> None:
    async def drive(page: Page, engine: FakeEngine, frontend: FrontendProcess) -> None:
        await page.open(f"{frontend.url}/dashboard")
        await page.until("!document.getElementById('key-form').hidden && document.activeElement.id === 'key'")
        assert await page.evaluate("document.getElementById('main').hidden")
        await page.write("wrong")
        await page.press(*ENTER)
        await page.until(f"{TEXT.format('connection')} === 'The key was refused'")
        await page.write("secret")
        await page.press(*ENTER)
        await page.until(f"!document.getElementById('main').hidden && {LAYOUT} === 'TP'")
        await page.evaluate("document.querySelector('[data-layout=cp]').click()")
        await page.until(f"{LAYOUT} === 'CP'")
        await page.open(f"{frontend.url}/dashboard?again")
        await page.until(f"document.getElementById('key-form').hidden && {LAYOUT} === 'CP'")
        kept = await page.evaluate("JSON.stringify([Object.values(sessionStorage), Object.values(localStorage)])")
        assert json.loads(kept) == [["secret"], []] and await page.evaluate("document.cookie") == ""
        assert all("401" in problem for problem in page.problems), page.problems

    with_fake(address, drive, "--api-key", "secret")


def test_refusals_engines_that_start_anew_and_a_server_that_comes_back(address: str) -> None:
    async def drive(page: Page, engine: FakeEngine, frontend: FrontendProcess) -> None:
        await page.look(width=800)
        await page.open(f"{frontend.url}/dashboard")
        await page.until(f"{TEXT.format('connection')} === 'Connected'")
        engine.layout_error = "layout: 'cp' is not possible now"
        await page.evaluate("document.querySelector('[data-layout=cp]').click()")
        await page.until(f'{TEXT.format("asked")} === "Refused: {engine.layout_error}"')
        engine.layout_error = None
        engine.silent_to_explain = True
        await page.until(f"{TEXT.format('verdict')}.includes('long step')")
        engine.silent_to_explain = False
        engine.send(ready_message(400, "second"))
        await page.until(f"{TEXT.format('connection')}.includes('has not said')")
        assert await page.evaluate(f"{TEXT.format('model')}") == "echo"
        port = frontend.port
        frontend.end()
        await page.until(f"{TEXT.format('connection')}.startsWith('Not connected, retrying; what is shown is of')")
        assert await page.evaluate("document.body.classList.contains('stale')")
        back = start_frontend(address, "--keep-engine", "--port", str(port))
        try:
            await page.until(f"{TEXT.format('connection')}.startsWith('Connected')")
            await page.until("!document.body.classList.contains('stale')")
        finally:
            back.end()

    with_fake(address, drive)
