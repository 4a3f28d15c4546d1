"""An engine without a model, at rank 0's end of the link: it answers every prompt with the prompt, again and again.

As a program, `python -m tests.frontend.fake_engine --engine ipc:///path`, it emits as fast as the link takes it.
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from splash_trt.link import (
    Cancel,
    Explain,
    Explanation,
    Frames,
    FromEngine,
    LayoutCapacity,
    LayoutReply,
    Ready,
    SetLayout,
    Shutdown,
    Status,
    Submit,
    ToEngine,
    in_columns,
)
from splash_trt.link_server import LinkServer
from splash_trt.request import FinishReason, Request, TokenDelta, TokenLogprob

EOS = 1
PREFILL = 3  # prompt tokens that a step gives log-probabilities of
LAYOUTS = ("tp", "dp", "cp", "dop")


def ready_message(vocab_size: int, incarnation: str = "first", max_context: int = 4096) -> Ready:
    return Ready(
        incarnation=incarnation,
        vocab_size=vocab_size,
        max_context=max_context,
        eos_token_ids=(EOS,),
        num_ranks=2,
        layouts=LAYOUTS,
        capacity={name: LayoutCapacity((4096, 4096), 8192, 4096) for name in LAYOUTS},
    )


@dataclass
class Running:
    client: bytes
    request: Request
    number: int | None = None
    num_done: int = 0
    num_scored: int = 0
    """Prompt tokens whose log-probabilities have been told."""


class FakeEngine(threading.Thread):
    """tokens_per_step: of each request in each step. While `paused` is set, no step completes."""

    def __init__(self, address: str, ready: Ready, *, tokens_per_step: int = 1, step_s: float = 0.0005) -> None:
        super().__init__(name="fake engine", daemon=True)
        self._address = address
        self._ready = ready
        self._tokens_per_step = tokens_per_step
        self._step_s = step_s
        self._clients: set[bytes] = set()
        self._running: list[Running] = []
        self._jobs: queue.SimpleQueue[Callable[[LinkServer, set[bytes]], None]] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._step = 0
        self.layout, self.mode = "tp", "auto"
        self.paused = threading.Event()
        self.submitted: list[Request] = []
        self.cancelled: list[str] = []
        self.finished: list[str] = []
        self.shut_down = threading.Event()
        self.layout_error: str | None = None
        self.script: tuple[int, ...] | None = None
        """What to answer with in place of the prompt."""
        self.silent_to_explain = False

    def send_raw(self, data: bytes) -> None:
        """These bytes to every frontend, in order with the rest."""

        def job(link: LinkServer, clients: set[bytes]) -> None:
            for client in clients:
                link._socket.send_multipart([client, data])

        self._jobs.put(job)

    def send(self, message: FromEngine) -> None:

        def job(link: LinkServer, clients: set[bytes]) -> None:
            for client in clients:
                link.send(client, message)

        self._jobs.put(job)

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        link = LinkServer(self._address)
        try:
            while not self._ended.is_set() and not self.shut_down.is_set():
                busy = bool(self._running) and not self.paused.is_set()
                for client, message in link.poll(0 if busy else 0.01):
                    self._take(link, client, message)
                while not self._jobs.empty():
                    self._jobs.get()(link, self._clients)
                if busy:
                    self._complete_step(link)
        finally:
            link.close()

    def _take(self, link: LinkServer, client: bytes, message: ToEngine | None) -> None:
        self._clients.add(client)
        if message is None:
            link.send(client, self._ready)
            link.send(client, self._frames([]))
        elif isinstance(message, Submit):
            self.submitted.append(message.request)
            self._running.append(Running(client, message.request, message.number))
        elif isinstance(message, Cancel):
            self.cancelled.append(message.request_id)
            self._running = [r for r in self._running if (r.client, r.request.id) != (client, message.request_id)]
        elif isinstance(message, SetLayout):
            if self.layout_error is None:
                self.layout = self.layout if message.layout == "auto" else message.layout
                self.mode = "pinned" if message.pin else "auto"
            link.send(client, LayoutReply(self._ready.incarnation, message.token, self.layout_error))
            for each in self._clients:
                link.send(each, self._frames([]))
        elif isinstance(message, Explain):
            if not self.silent_to_explain:
                report: dict[str, object] = {"chosen": self.layout, "compared": [{"layout": "dp", "gain": 0.51234567}]}
                link.send(client, Explanation(self._ready.incarnation, message.token, report))
        else:
            assert isinstance(message, Shutdown)
            self.shut_down.set()

    def _complete_step(self, link: LinkServer) -> None:
        time.sleep(self._step_s)
        self._step += 1
        deltas: dict[bytes, list[tuple[int | None, TokenDelta]]] = {client: [] for client in self._clients}
        going_on = []
        for running in self._running:
            delta = self._advance(running)
            deltas[running.client].append((running.number, delta))
            if delta.finish is None:
                going_on.append(running)
            else:
                self.finished.append(running.request.id)
        num_tokens = self._tokens_per_step * len(self._running)
        self._running = going_on
        for client, of_client in deltas.items():
            link.send(client, self._frames(of_client, num_tokens))

    def _advance(self, running: Running) -> TokenDelta:
        sampling, prompt = running.request.sampling, running.request.prompt
        scores: tuple[TokenLogprob, ...] = ()
        if sampling.prompt_logprobs is not None and running.num_scored < len(prompt) - 1:
            num_top, begin = sampling.prompt_logprobs, running.num_scored + 1
            scores = tuple(self._logprob(token, num_top) for token in prompt[begin : begin + PREFILL])
            running.num_scored += len(scores)
            if running.num_scored < len(prompt) - 1:
                return TokenDelta(running.request.id, (), prompt_logprobs=scores)
        source = prompt if self.script is None else self.script
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
        tokens: list[int] = []
        finish = None
        while len(tokens) < self._tokens_per_step and finish is None:
            tokens.append(source[running.num_done % len(source)])
            running.num_done += 1
            if tokens[-1] in stops:
                finish = FinishReason.STOP
            elif running.num_done == sampling.max_tokens:
                finish = FinishReason.LENGTH
        logprobs = () if sampling.logprobs is None else tuple(self._logprob(t, sampling.logprobs) for t in tokens)
        return TokenDelta(running.request.id, tuple(tokens), logprobs, scores, finish)

    def _logprob(self, token: int, num_top: int) -> TokenLogprob:
        vocab_size = self._ready.vocab_size
        return TokenLogprob(token, -0.5, tuple(((token + i) % vocab_size, -0.5 - i) for i in range(num_top)))

    def _frames(self, deltas: list[tuple[int | None, TokenDelta]], num_tokens: int = 0) -> Frames:
        status = Status(
            layout=self.layout,
            epoch=0,
            switch="steady",
            switch_target=None,
            switch_progress=1.0,
            mode=self.mode,
            running=len(self._running),
            waiting=0,
            running_by_rank=(len(self._running), 0),
            used_tokens=(64 * len(self._running), 0),
            total_tokens=(4096, 4096),
        )
        step = self._step if num_tokens else 0
        numbers, tokens, others = in_columns(deltas)
        incarnation = self._ready.incarnation
        return Frames(incarnation, step, num_tokens, self._step_s, status, others, numbers=numbers, tokens=tokens)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--tokens-per-step", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    args = parser.parse_args(argv)
    ready = ready_message(args.vocab, max_context=1 << 20)
    engine = FakeEngine(args.engine, ready, tokens_per_step=args.tokens_per_step, step_s=args.step_seconds)
    engine.run()


if __name__ == "__main__":
    main(sys.argv[1:])
