"""A process of closed-loop clients: each sends its next request when its last one has ended. load.py starts it.

It reads a Job as JSON from the first line of stdin, writes "ready", begins when it reads another line, and writes all
Answers as JSON. Prompts are random token ids. Streams are asked for with token ids and without text, and tokens are
counted in them.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator

import aiohttp
import msgspec

FIRST_ID = 1000  # lower ids may have a special meaning
DATA = b"data: {"
MAX_LINE_BYTES = 1 << 20


class Wish(msgspec.Struct, frozen=True, array_like=True):
    """One request, in tokens."""

    prompt: int
    output: int
    """After so many tokens the client has enough."""
    max_tokens: int
    """What the client asks for. If this is more than `output`, it leaves in the middle of the stream."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    model: str
    vocab_size: int
    seed: int
    clients: int
    wishes: list[Wish]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """begin, first, end: when it was sent, when its first and when its last token was read, in seconds of the machine's
    monotonic clock."""

    begin: float
    first: float
    end: float
    tokens: int
    failure: str


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []


_decoder = msgspec.json.Decoder(_Chunk)


def body(job: Job, wish: Wish, rng: random.Random) -> dict[str, object]:
    first = min(FIRST_ID, job.vocab_size // 2)
    return {
        "model": job.model,
        "prompt": [rng.randrange(first, job.vocab_size) for _ in range(wish.prompt)],
        "max_tokens": wish.max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
        "detokenize": False,
    }


def tokens_of(line: bytes) -> int:
    """The number of tokens in one line of a stream of server-sent events."""
    if not line.startswith(DATA):
        return 0
    return sum(len(choice.token_ids or ()) for choice in _decoder.decode(line[len(DATA) - 1 :]).choices)


async def one(session: aiohttp.ClientSession, job: Job, wish: Wish, rng: random.Random) -> Answer:
    """One request, from sending it to its last token."""
    asked = json.dumps(body(job, wish, rng)).encode()
    headers = {"Content-Type": "application/json"}
    begin = first = end = time.monotonic()
    tokens, failure = 0, ""
    try:
        async with session.post(f"{job.url}/v1/completions", data=asked, headers=headers) as response:
            if response.status != 200:
                failure = f"{response.status}: {(await response.text())[:200]}"
            else:
                async for line in response.content:
                    count = tokens_of(line)
                    if count:
                        end = time.monotonic()
                        first = end if tokens == 0 else first
                        tokens += count
                    if tokens >= wish.output and wish.max_tokens > wish.output:
                        tokens = wish.output
                        response.close()
                        break
    except (aiohttp.ClientError, msgspec.MsgspecError, asyncio.TimeoutError) as error:
        failure = repr(error)[:200]
    if not failure and tokens != wish.output:
        failure = f"{tokens} tokens in the stream, {wish.output} asked"
    return Answer(begin=begin, first=first, end=end, tokens=tokens, failure=failure)


async def drive(job: Job) -> list[Answer]:
    """All of the job's requests, at most job.clients of them at a time."""
    rng = random.Random(job.seed)
    wishes: Iterator[Wish] = iter(job.wishes)
    answers: list[Answer] = []
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=MAX_LINE_BYTES) as session:

        async def client() -> None:
            for wish in wishes:
                answers.append(await one(session, job, wish, rng))

        await asyncio.gather(*(client() for _ in range(job.clients)))
    return answers


def main() -> None:
    job = msgspec.json.decode(sys.stdin.readline(), type=Job)
    print("ready", flush=True)
    if sys.stdin.readline():  # empty if the parent is gone
        sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(drive(job))))


if __name__ == "__main__":
    main()
