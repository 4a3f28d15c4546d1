"""Drives Debian's Chromium by its DevTools protocol, over aiohttp's WebSocket: nothing to install but the browser."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)
START_S = 60.0
ANSWER_S = 60.0
POLL_S = 0.05
PROGRAM = shutil.which("chromium")


class Page:
    """One tab. `problems`: what went wrong on it, by the console, exceptions and failed loads."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse[Any]) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.problems: list[str] = []
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                self._answers.pop(data["id"]).set_result(data)
            else:
                self._take(data["method"], data["params"])

    def _take(self, event: str, about: dict[str, Any]) -> None:
        bad = ("error", "warning", "assert")
        is_problem = event == "Runtime.exceptionThrown"
        is_problem |= event == "Runtime.consoleAPICalled" and about["type"] in bad
        is_problem |= event == "Log.entryAdded" and about["entry"]["level"] in bad
        if is_problem:
            self.problems.append(json.dumps(about))

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        data = await asyncio.wait_for(answer, ANSWER_S)
        assert "error" not in data, (method, data)
        return data["result"]

    async def evaluate(self, expression: str) -> Any:
        """Its value, or its promise's."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, seconds: float = 60.0) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while not await self.evaluate(expression):
            assert asyncio.get_running_loop().time() < end, f"did not come true: {expression}"
            await asyncio.sleep(POLL_S)

    async def look(self, *, width: int, height: int = 900, dark: bool = False, scale: float = 1.0) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500}
        await self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href == {json.dumps(url)} && document.readyState == 'complete'")

    async def press(self, key: str, code: int, *, shift: bool = False) -> None:
        """A key without text, or Enter and space, by its name in the DOM and its Windows code."""
        text = {"Enter": "\r", " ": " "}.get(key)
        event: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def write(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def screenshot(self, path: Path) -> None:
        """The whole page."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    async def accessible(self) -> list[dict[str, Any]]:
        """The accessibility tree's nodes that are not ignored, as {"role", "name"} and properties."""
        nodes = (await self.call("Accessibility.getFullAXTree"))["nodes"]
        return [
            {
                "role": node["role"]["value"],
                "name": node.get("name", {}).get("value", ""),
                **{p["name"]: p["value"].get("value") for p in node.get("properties", [])},
            }
            for node in nodes
            if not node["ignored"]
        ]


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """A new browser with a profile of its own, and its one tab."""
    assert PROGRAM is not None, "there is no chromium; on Debian: apt-get install chromium"
    with tempfile.TemporaryDirectory(prefix="splash-chromium-", ignore_cleanup_errors=True) as folder:
        command = [PROGRAM, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = (await _written(Path(folder, "DevToolsActivePort"))).split()[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    targets = await answer.json()
                address = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    page = Page(socket)
                    await page.call("Emulation.setScrollbarsHidden", hidden=True)  # they would take room in pictures
                    for domain in ("Page", "Runtime", "Log", "Accessibility"):
                        await page.call(f"{domain}.enable")
                    yield page
                    page.reader.cancel()
        finally:
            process.kill()
            process.wait()


async def _written(path: Path) -> str:
    end = asyncio.get_running_loop().time() + START_S
    while not path.exists() or "\n" not in path.read_text():
        assert asyncio.get_running_loop().time() < end, "chromium did not start"
        await asyncio.sleep(POLL_S)
    return path.read_text()


def run(test: Callable[[Page], Awaitable[None]]) -> None:
    async def main() -> None:
        async with browser() as page:
            await test(page)

    asyncio.run(main())
