"""Loads a server from several client processes at once, and sums up what they saw."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import msgspec
import numpy as np

from perf import harness
from perf.serving.client import Answer, Job, Wish

ANSWER_S = 3600.0


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A number of clients, and how many requests they send in all; lengths are in tokens."""

    clients: int
    prompt: int
    output: int
    requests: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """CLIENTSxPROMPTxOUTPUTxREQUESTS; ValueError for anything else."""
        words = text.split("x")
        if len(words) != 4 or not all(word.isdecimal() and int(word) > 0 for word in words):
            raise ValueError(f"case: {text!r} is not CLIENTSxPROMPTxOUTPUTxREQUESTS, such as 16x512x128x64")
        clients, prompt, output, requests = map(int, words)
        return cls(clients=clients, prompt=prompt, output=output, requests=requests)

    def wishes(self) -> list[Wish]:
        return [Wish(self.prompt, self.output, self.output)] * self.requests


def run(
    url: str, model: str, vocab_size: int, wishes: Sequence[Wish], *, clients: int, processes: int, seed: int
) -> list[Answer]:
    """Sends every wish once, from this many clients in this many processes; returns the answers, in no order. Raises
    CalledProcessError if a client process fails."""
    processes = min(processes, clients, len(wishes))
    started = []
    for number in range(processes):
        job = Job(
            url=url,
            model=model,
            vocab_size=vocab_size,
            seed=seed * processes + number,
            clients=len(range(number, clients, processes)),
            wishes=list(wishes[number::processes]),
        )
        command = [sys.executable, "-m", "perf.serving.client"]
        client = subprocess.Popen(command, cwd=harness.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert client.stdin is not None
        client.stdin.write(msgspec.json.encode(job) + b"\n")
        client.stdin.flush()
        started.append(client)
    try:
        for client in started:
            assert client.stdout is not None and client.stdin is not None
            if client.stdout.readline() != b"ready\n":
                raise subprocess.CalledProcessError(client.wait(), client.args)
        for client in started:
            assert client.stdin is not None
            client.stdin.write(b"go\n")
            client.stdin.flush()
        answers: list[Answer] = []
        for client in started:
            told, _ = client.communicate(timeout=ANSWER_S)
            if client.returncode:
                raise subprocess.CalledProcessError(client.returncode, client.args)
            answers += msgspec.json.decode(told, type=list[Answer])
    finally:
        for client in started:
            client.kill()
            client.wait()
    return answers


def figures(answers: Sequence[Answer]) -> harness.Row:
    """tokens_per_s, over the time from the first request to the last token; and percentiles over complete answers of
    the time to the first token (ttft) and of the time per output token after it (tpot), in milliseconds."""
    good = [answer for answer in answers if not answer.failure]
    took = max(a.end for a in answers) - min(a.begin for a in answers)
    row: harness.Row = {
        "failed": len(answers) - len(good),
        "seconds": round(took, 3),
        "tokens_per_s": round(sum(a.tokens for a in answers) / took, 1) if took > 0 else 0.0,
    }
    first = [a.first - a.begin for a in good]
    each = [(a.end - a.first) / (a.tokens - 1) for a in good if a.tokens > 1]
    for name, values in (("ttft", first), ("tpot", each)):
        for percent in (50, 99):
            row[f"{name}_ms_p{percent}"] = _percentile(values, percent / 100)
    return row


def _percentile(seconds: Sequence[float], share: float) -> float | None:
    """The value that a `share` of all values is below, in milliseconds."""
    if not seconds:
        return None
    return round(float(np.sort(seconds)[min(len(seconds) - 1, int(len(seconds) * share))]) * 1e3, 3)
