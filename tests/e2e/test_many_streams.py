"""500 streams at once through two frontends: all arrive whole, and memory does not grow from one time to the next."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.e2e.servers import Server

pytestmark = [pytest.mark.mpi, pytest.mark.nightly]

NUM_STREAMS = 500
NUM_TOKENS = 64
ROUNDS = 5
GROWTH = 1.05  # of the third round's memory to the last one's


@pytest.fixture(scope="module")
def many(engine: Path) -> Iterator[Server]:
    flags = ["--engine", str(engine), "--dtype", "float32", "--memory", "512M", "--frontends", "2"]
    server = Server("supervised", 1, [*flags, "--max-running", "512", "--page-tokens", "16"])
    try:
        yield server.wait_until_ready()
    finally:
        server.close()


async def stream(port: int, number: int) -> list[int]:
    """The tokens of one; AssertionError if it did not end as it should."""
    body = {"prompt": [5, 6, 7 + number % 100], "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    data = json.dumps({**body, "return_token_ids": True, "seed": number}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    lines = (await asyncio.wait_for(reader.read(), 300)).decode().splitlines()
    writer.close()
    assert lines[0] == "HTTP/1.1 200 OK", lines[0]
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1:] == ["[DONE]"], lines[-3:]
    return [token for event in events[:-1] for choice in json.loads(event)["choices"] for token in choice["token_ids"]]


async def round_of(port: int) -> list[list[int]]:
    return await asyncio.gather(*(stream(port, number) for number in range(NUM_STREAMS)))


def memory(server: Server) -> dict[str, int]:
    """Resident bytes, by process."""
    server.look()
    kinds = [("frontend", "splash_trt.frontend.main"), ("rank", "serve-rank")]
    found = {}
    for process in psutil.Process(server.process.pid).children(recursive=True):
        words = process.cmdline()
        for kind, word in kinds:
            if word in words and "prterun" not in words[0]:
                found[f"{kind} {process.pid}"] = process.memory_info().rss
    return found


def test_none_is_lost_and_memory_is_flat(many: Server) -> None:
    seen = []
    for _ in range(ROUNDS):
        answers = asyncio.run(round_of(many.port))
        assert [len(tokens) for tokens in answers] == [NUM_TOKENS] * NUM_STREAMS
        seen.append(memory(many))
        print({name: f"{size >> 20} MiB" for name, size in seen[-1].items()})
    assert len(seen[0]) == 3 and all(sizes.keys() == seen[0].keys() for sizes in seen)
    for name, size in seen[2].items():
        assert seen[-1][name] <= GROWTH * size, (name, [sizes[name] for sizes in seen])
    assert many.ask("GET", "/v1/layout").json["status"]["running"] == 0
