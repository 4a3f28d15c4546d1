"""Drives the server over HTTP as any client would, and watches it meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from scripts.demo.load import Ask
from scripts.demo.processes import Failure
from scripts.demo.timeline import Sample, unvisited

SAMPLE_S = 0.2
READY_S = 240.0
REQUEST_S = 900.0
HOLD_TOKENS = 24  # of the last answer under each layout that the demo asks for
COMPUTED = re.compile(r'^splash_tokens_total\{layout="(\w+)"\} (\S+)$', re.MULTILINE)


@dataclass
class Answer:
    """One request's answer as it comes."""

    ask: Ask
    began: float
    """Second of the run at which it was sent."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    done: bool = False


class Client:
    """Sends the requests, and records `samples` of the server's state, and in `asked` the demo's own layout changes."""

    def __init__(self, url: str, server: subprocess.Popen[bytes], on_sample: Callable[[Client], None]) -> None:
        self._url = url
        self._server = server
        self._on_sample = on_sample
        self._began = time.monotonic()
        self._session: aiohttp.ClientSession | None = None
        self.answers: list[Answer] = []
        self.samples: list[Sample] = []
        self.asked: list[tuple[float, str]] = []

    async def __aenter__(self) -> Client:
        connections = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connections, timeout=aiohttp.ClientTimeout(total=REQUEST_S))
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    @property
    def visited(self) -> list[str]:
        """Layouts seen, in order of the first time."""
        return list(dict.fromkeys(sample.layout for sample in self.samples))

    async def ready(self, on_wait: Callable[[float], None]) -> None:
        """Waits until the server is ready. on_wait: called with the seconds so far. Raises Failure if the server ends,
        or takes too long."""
        while self.seconds < READY_S:
            self._check_alive()
            try:
                async with self._get("/readyz") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass  # the server does not listen yet
            on_wait(self.seconds)
            await asyncio.sleep(SAMPLE_S)
        raise Failure(f"the server was not ready after {READY_S:.0f} s")

    async def run(self, burst: Sequence[Ask], then: Callable[[Sequence[Answer]], Ask]) -> None:
        """Sends the burst, then one request made from its answers; watches the server until a moment after that."""
        self._began = time.monotonic()
        watching = asyncio.create_task(self._watch())
        work = asyncio.create_task(self._ask_all(burst, then))
        try:
            await asyncio.wait({watching, work}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            work.result()
            await self._sample()
        finally:
            watching.cancel()
            work.cancel()
            await asyncio.gather(watching, work, return_exceptions=True)

    async def switches(self) -> list[dict[str, Any]]:
        """The server's records of its switches, newest first."""
        async with self._get("/v1/switches") as response:
            records: list[dict[str, Any]] = (await response.json())["data"]
            return records

    async def _ask_all(self, burst: Sequence[Ask], then: Callable[[Sequence[Answer]], Ask]) -> None:
        await asyncio.gather(*(self._ask(self._answer(ask)) for ask in burst))
        last = self._answer(then(self.answers))
        visiting = asyncio.create_task(self._visit_the_rest(last))
        try:
            await self._ask(last)
        finally:
            visiting.cancel()
            await asyncio.gather(visiting, return_exceptions=True)

    def _answer(self, ask: Ask) -> Answer:
        self.answers.append(Answer(ask, self.seconds))
        return self.answers[-1]

    async def _ask(self, answer: Answer) -> None:
        """Streams one answer."""
        async with self._post(answer.ask.path, answer.ask.body()) as response:
            if response.status != 200:
                raise Failure(f"{answer.ask.name}: HTTP {response.status}: {(await response.text())[:500]}")
            async for line in response.content:
                event = _event(answer, line.decode(errors="replace").strip())
                if event is not None:
                    _take(answer, event)
        if not answer.done:
            raise Failure(f"{answer.ask.name}: the answer ended after {len(answer.tokens)} tokens without a last word")

    async def _visit_the_rest(self, last: Answer) -> None:
        """While the last answer is generated, asks for the layouts to which the load has not led."""
        while not last.tokens:
            await asyncio.sleep(SAMPLE_S / 4)
        for layout in unvisited(self.visited):
            async with self._post("/v1/layout", {"layout": layout}) as response:
                if response.status != 200:
                    raise Failure(f"POST /v1/layout: HTTP {response.status}: {(await response.text())[:500]}")
            self.asked.append((self.seconds, layout))
            while layout not in self.visited:
                await asyncio.sleep(SAMPLE_S / 4)
            enough = len(last.tokens) + HOLD_TOKENS
            while len(last.tokens) < enough:
                await asyncio.sleep(SAMPLE_S / 4)

    async def _watch(self) -> None:
        while True:
            self._check_alive()
            await self._sample()
            self._on_sample(self)
            await asyncio.sleep(SAMPLE_S)

    async def _sample(self) -> None:
        async with self._get("/metrics") as response:
            computed = {layout: float(count) for layout, count in COMPUTED.findall(await response.text())}
        async with self._get("/v1/layout") as response:
            status = (await response.json())["status"]
        sample = Sample(
            at=self.seconds,
            layout=status["layout"],
            switch=status["switch"],
            running=status["running"],
            used_tokens=tuple(status["used_tokens"]),
            computed=computed,
        )
        self.samples.append(sample)

    def _check_alive(self) -> None:
        code = self._server.poll()
        if code is not None:
            raise Failure(f"the server ended with exit code {code}")

    def _get(self, path: str) -> Any:
        assert self._session is not None
        return self._session.get(self._url + path)

    def _post(self, path: str, body: dict[str, object]) -> Any:
        assert self._session is not None
        return self._session.post(self._url + path, json=body)


def _event(answer: Answer, line: str) -> dict[str, Any] | None:
    """What a line of the stream says; None: nothing, as the comments of a quiet server. Failure if it is no event."""
    if not line or line.startswith(":") or line == "data: [DONE]":
        return None
    try:
        event = json.loads(line.removeprefix("data:"))
    except ValueError:
        event = None
    if not isinstance(event, dict) or not ("choices" in event or "error" in event):
        raise Failure(f"{answer.ask.name}: a line of the stream is no event: {line[:200]!r}")
    return event


def _take(answer: Answer, event: dict[str, Any]) -> None:
    """One server-sent event of a completion or a chat."""
    if "error" in event:
        raise Failure(f"{answer.ask.name}: {event['error'].get('message', event['error'])}")
    for choice in event["choices"]:
        answer.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        answer.tokens += choice.get("token_ids") or []
        answer.done = answer.done or choice["finish_reason"] is not None
