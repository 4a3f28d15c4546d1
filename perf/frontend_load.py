"""A client that costs next to no CPU time: it reads raw sockets and only counts spaces and braces in what it receives.

Its prompts consist of tokens that have one space each and no brace, and answers repeat the prompt. An event of a
completion has two opening braces and one space of its own; so every other space is a token.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

DEADLINE_S = 300.0


class Stream(msgspec.Struct):
    """arrivals: for each read that brought tokens, (time in nanoseconds of the monotonic clock, tokens so far)."""

    id: str = ""
    tokens: int = 0
    events: int = 0
    done: bool = False
    arrivals: list[tuple[int, int]] = []


class Reader:
    def __init__(self, port: int, body: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        self.socket.sendall(head % len(body) + body)
        self.socket.setblocking(False)
        self._head = b""
        self._in_body = False
        self._spaces = 0
        self._braces = 0
        self.stream = Stream()

    def read(self) -> bool:
        """Reads what has come; False at the end of the stream."""
        data, stream = self.socket.recv(1 << 16), self.stream
        if not data:
            stream.done = self._head.endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
            return False
        if not self._in_body:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return True
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(head.decode())
            names = [line for line in head.split(b"\r\n") if line.lower().startswith(b"x-request-id: ")]
            stream.id = names[0].split()[1].decode()
            self._in_body, self._head = True, b""
        self._head = (self._head + data)[-32:]
        self._spaces += data.count(b" ")
        self._braces += data.count(b"{")
        stream.events = self._braces // 2
        before, stream.tokens = stream.tokens, self._spaces - stream.events
        if stream.tokens > before:
            stream.arrivals.append((time.monotonic_ns(), stream.tokens))
        return True


def run(port: int, count: int, body: bytes) -> list[Stream]:
    """Reads `count` streams at once. [DONE], which has a space too, is not counted as a token."""
    selector = selectors.DefaultSelector()
    readers = [Reader(port, body) for _ in range(count)]
    for reader in readers:
        selector.register(reader.socket, selectors.EVENT_READ, reader)
    end, left = time.monotonic() + DEADLINE_S, count
    while left and time.monotonic() < end:
        for key, _ in selector.select(1.0):
            if not key.data.read():
                selector.unregister(key.fileobj)
                key.data.socket.close()
                left -= 1
    for reader in readers:
        reader.stream.tokens -= reader.stream.done
    return [reader.stream for reader in readers]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m perf.frontend_load")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="tokens of each stream")
    parser.add_argument("--prompt", type=json.loads, required=True, help="token ids, as a JSON list")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    body = {"prompt": options.prompt, "max_tokens": options.tokens, "ignore_eos": True, "stream": True}
    streams = run(options.port, options.streams, json.dumps(body).encode())
    options.out.write_bytes(msgspec.json.encode(streams))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
