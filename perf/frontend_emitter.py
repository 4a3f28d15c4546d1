"""A stand-in for the engine at rank 0's end of the real link. In each step every request gets one token: those of its
prompt, over and over. Steps come at fixed times; when it is late it catches up.

When it is told to end (SIGTERM), the program writes when each step was "sampled", and each request's first step.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from splash_trt import link
from splash_trt.link import Cancel, Frames, LayoutCapacity, Ready, Shutdown, Status, Submit
from splash_trt.link_server import LinkServer
from splash_trt.request import FinishReason, Request, TokenDelta

MAX_CONTEXT = 1 << 20


class Times(msgspec.Struct):
    """steps: each step's time in nanoseconds of the monotonic clock. first: by request id, the step that gave its first
    token."""

    steps: list[int] = []
    first: dict[str, int] = {}


class Running:
    """A request, and how many tokens it has got."""

    __slots__ = ("request", "number", "count", "most")

    def __init__(self, request: Request, number: int | None) -> None:
        self.request = request
        self.number = number
        self.count = 0
        self.most = request.sampling.max_tokens

    def advance(self) -> TokenDelta:
        token = self.request.prompt[self.count % len(self.request.prompt)]
        self.count += 1
        finish = FinishReason.LENGTH if self.count == self.most else None
        return TokenDelta(self.request.id, (token,), finish=finish)


class Emitter:
    def __init__(self, address: str, vocab_size: int, step_s: float) -> None:
        self._link = LinkServer(address)
        room = LayoutCapacity((MAX_CONTEXT,), MAX_CONTEXT, MAX_CONTEXT)
        self._ready = Ready("emitter", vocab_size, MAX_CONTEXT, (), 1, ("tp",), {"tp": room})
        self._step_s = step_s
        self._running: dict[bytes, dict[str, Running]] = {}
        self._next = 0.0
        self.ended = False
        self.times = Times()

    def run(self) -> None:
        while not self.ended:
            busy = any(self._running.values())
            wait_s = max(0.0, self._next - time.monotonic()) if busy else 0.05
            for client, message in self._link.poll(wait_s):
                self._take(client, message)
            if busy and time.monotonic() >= self._next:
                self._next += self._step_s
                self._step()
        self._link.close()

    def _take(self, client: bytes, message: link.ToEngine | None) -> None:
        requests = self._running.setdefault(client, {})
        if message is None:
            self._link.send(client, self._ready)
            self._link.send(client, self._frames((), (), (), 0))
        elif isinstance(message, Submit):
            if not any(self._running.values()):
                self._next = time.monotonic()
            requests[message.request.id] = Running(message.request, message.number)
            self.times.first[message.request.id] = len(self.times.steps)
        elif isinstance(message, Cancel):
            requests.pop(message.request_id, None)
        elif isinstance(message, Shutdown):
            self.ended = True

    def _step(self) -> None:
        self.times.steps.append(time.monotonic_ns())
        num_tokens = sum(map(len, self._running.values()))
        for client, requests in self._running.items():
            deltas = [(running.number, running.advance()) for running in requests.values()]
            for _, delta in deltas:
                if delta.finish is not None:
                    del requests[delta.request_id]
            self._link.send(client, self._frames(*link.in_columns(deltas), num_tokens))

    def _frames(
        self, numbers: tuple[int, ...], tokens: tuple[int, ...], deltas: tuple[TokenDelta, ...], num_tokens: int
    ) -> Frames:
        num_running = sum(map(len, self._running.values()))
        used = (num_running,)
        status = Status("tp", 0, "steady", None, 1.0, "auto", num_running, 0, used, used, (MAX_CONTEXT,))
        step = len(self.times.steps)
        return Frames("emitter", step, num_tokens, self._step_s, status, deltas, numbers=numbers, tokens=tokens)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m perf.frontend_emitter")
    parser.add_argument("--engine", required=True, metavar="ADDRESS")
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--times", type=Path, required=True)
    options = parser.parse_args(arguments)
    emitter = Emitter(options.engine, options.vocab, options.step_ms / 1e3)

    def end(*_: object) -> None:
        emitter.ended = True

    signal.signal(signal.SIGTERM, end)
    emitter.run()
    options.times.write_bytes(msgspec.json.encode(emitter.times))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
