"""How fast tokens get from rank 0's link to clients, without a model: `python -m perf.frontend --help`.

A stand-in for the engine (frontend_emitter.py) gives every request one token a step, at fixed times. Frontends, started
as by `splash-trt serve --frontends K`, read them from the real link, detokenise them and write server-sent events.
Clients (frontend_load.py) count tokens. All of these share the machine's cores. A token's delay is the time from just
before its step's message is made until a client has read it. CPU seconds are summed over all processes of a kind while
tokens flow.
"""

from __future__ import annotations

import argparse
import atexit
import http.client
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import psutil  # type: ignore[import-untyped]

from perf import harness, report
from perf.frontend_emitter import Times
from perf.frontend_load import Stream
from splash_trt.frontend.options import Options
from splash_trt.frontend.tokenizer import Tokenizer
from splash_trt.frontends import Frontends

MODEL = harness.ROOT / "models" / "splash-tiny"
VIEW = harness.View(x="offered", y="tokens_per_s", series="frontends", panels=("streams",), ratio=None)
PROBE_S = 0.02
RAMP = 0.2  # this share of tokens is left out at both ends of each stream, where not all streams flow


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m perf.frontend")
    parser.add_argument("--frontends", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--streams", type=int, nargs="+", default=[50, 500])
    parser.add_argument("--offered", type=int, nargs="+", default=[2500, 30000],
                        help="tokens per second that the engine emits, all streams together")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all cases; numbers are medians over rounds")
    parser.add_argument("--clients", type=int, default=1, help="client processes")
    parser.add_argument("--name", default="tokens", help="the result's name")
    parser.add_argument("--remark", default="nothing is known of what else the machine was doing")
    parser.add_argument("--results", type=Path, default=harness.RESULTS)
    return parser.parse_args(arguments)


def countable(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Tokens whose text is a space and letters, which clients can count."""
    texts = {token: tokenizer.token_bytes(token) for token in range(vocab_size)}
    return [token for token, text in texts.items() if text[:1] == b" " and text[1:].isalpha() and text.isascii()]


class Probe(threading.Thread):
    """Asks for /healthz again and again, each time over a new connection. answers: for each, (when it was asked for, in
    nanoseconds of the monotonic clock; the seconds that it took)."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self.ended = threading.Event()
        self.answers: list[tuple[int, float]] = []

    def run(self) -> None:
        while not self.ended.wait(PROBE_S):
            begin = time.monotonic_ns()
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            connection.request("GET", "/healthz")
            assert connection.getresponse().status == 200
            connection.close()
            self.answers.append((begin, (time.monotonic_ns() - begin) / 1e9))


class Deployment:
    """An emitter and `count` frontends, with their files in `folder`."""

    def __init__(self, folder: Path, count: int, step_s: float, vocab_size: int) -> None:
        self.times_path = folder / "times"
        address = f"ipc://{folder}/link"
        command = [sys.executable, "-m", "perf.frontend_emitter", "--engine", address, "--vocab", str(vocab_size)]
        command += ["--step-ms", str(step_s * 1e3), "--times", str(self.times_path)]
        self.emitter = subprocess.Popen(command, cwd=harness.ROOT)
        atexit.register(self.emitter.kill)  # if anything fails before `end`
        options = Options(
            engine=address, model_name="emitter", tokenizer=str(MODEL), port=0, max_queued=10_000, log_level="warning"
        )

        def failed(code: int, why: str) -> None:
            raise RuntimeError(why)

        self.frontends = Frontends(options, count, folder, restarts=False, failed=failed)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        """Asks until many answers in a row are good: each goes to any of the frontends."""
        ready, end = 0, time.monotonic() + 60
        while ready < 20:
            assert time.monotonic() < end, "the frontends did not become ready"
            connection = http.client.HTTPConnection("127.0.0.1", self.frontends.port, timeout=60)
            connection.request("GET", "/readyz")
            ready = ready + 1 if connection.getresponse().status == 200 else 0
            connection.close()
            time.sleep(0 if ready else 0.1)

    def end(self) -> Times:
        self.frontends.end()
        self.frontends.close()
        self.emitter.terminate()
        self.emitter.wait()
        return msgspec.json.decode(self.times_path.read_bytes(), type=Times)


def cpu_seconds(pids: Sequence[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def run_case(options: argparse.Namespace, count: int, num_streams: int, offered: int) -> harness.Row:
    tokenizer = Tokenizer(MODEL)
    vocab_size = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    prompt = countable(tokenizer, vocab_size)[:500]
    num_tokens = round(offered * options.seconds / num_streams)
    with tempfile.TemporaryDirectory(prefix="splash-") as name:
        folder = Path(name)
        deployment = Deployment(folder, count, num_streams / offered, vocab_size)
        probe = Probe(deployment.frontends.port)
        probe.start()
        frontends, emitter = deployment.frontends.processes(), [deployment.emitter.pid]
        before = cpu_seconds(frontends), cpu_seconds(emitter)
        clients = []
        for number in range(options.clients):
            share = len(range(number, num_streams, options.clients))
            command = [sys.executable, "-m", "perf.frontend_load", "--port", str(deployment.frontends.port)]
            command += ["--streams", str(share), "--tokens", str(num_tokens), "--prompt", json.dumps(prompt)]
            command += ["--out", str(folder / f"client{number}")]
            clients.append(subprocess.Popen(command, cwd=harness.ROOT))
        codes = [client.wait() for client in clients]
        after = cpu_seconds(frontends), cpu_seconds(emitter)
        probe.ended.set()
        probe.join()
        assert not any(codes), f"clients ended with {codes}"
        times = deployment.end()
        files = [folder / f"client{number}" for number in range(options.clients)]
        streams = [stream for path in files for stream in msgspec.json.decode(path.read_bytes(), type=list[Stream])]
    lost = [stream for stream in streams if not stream.done or stream.tokens != num_tokens]
    total = num_streams * num_tokens
    row: harness.Row = {"frontends": count, "streams": num_streams, "offered": offered, "lost": len(lost)}
    row |= measured(streams, times, num_tokens)
    row["tokens_per_event"] = total / sum(stream.events for stream in streams)
    row["frontend_cpu_us_per_token"] = (after[0] - before[0]) / total * 1e6
    row["engine_cpu_us_per_token"] = (after[1] - before[1]) / total * 1e6
    begin, end = middle(streams)
    seconds = [seconds for at, seconds in probe.answers if begin <= at < end]
    row["healthz_p50_ms"], row["healthz_p99_ms"] = (np.percentile(seconds, [50, 99]) * 1e3).tolist()
    return row


def median(rows: Sequence[harness.Row]) -> harness.Row:
    """The median over one case's rounds of each measured number, and the sum of lost streams."""
    row = {name: float(np.median([row[name] for row in rows])) if isinstance(value, float) else value
           for name, value in rows[0].items()}  # fmt: skip
    return {**row, "lost": sum(int(row["lost"] or 0) for row in rows)}


def middle(streams: Sequence[Stream]) -> tuple[int, int]:
    """(begin, end) of the time in which all streams flow, in nanoseconds: each has had a fifth of its reads, and has a
    fifth of them to come."""
    begin = max(stream.arrivals[len(stream.arrivals) // 5][0] for stream in streams)
    return begin, min(stream.arrivals[-len(stream.arrivals) // 5][0] for stream in streams)


def measured(streams: Sequence[Stream], times: Times, num_tokens: int) -> harness.Row:
    """Rate and delays of the middle part of each stream."""
    low, high = round(num_tokens * RAMP), round(num_tokens * (1 - RAMP))
    steps, delays, counts = np.array(times.steps), [], []
    for stream in streams:
        at, done = np.array(stream.arrivals).T
        # Token n came with the first read after which there were at least n + 1 tokens.
        numbers = np.arange(low, min(high, stream.tokens))
        read = np.searchsorted(done, numbers, side="right")
        first = times.first[f"{stream.id}-0"]
        delays.append(at[read] - steps[first + numbers])
        counts.append(np.stack([at, np.diff(done, prepend=0)]))
    every = np.concatenate(counts, axis=1)
    begin, end = middle(streams)
    inside = (every[0] >= begin) & (every[0] < end)
    row: harness.Row = {"tokens_per_s": float(every[1][inside].sum() / max(end - begin, 1) * 1e9)}
    p50, p90, p99 = (np.percentile(np.concatenate(delays), [50, 90, 99]) / 1e6).tolist()
    return row | {"delay_p50_ms": p50, "delay_p90_ms": p90, "delay_p99_ms": p99}


def same_text() -> str:
    """The check: a stream's text is that of its tokens. AssertionError if not."""
    tokenizer = Tokenizer(MODEL)
    vocab_size = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    prompt = countable(tokenizer, vocab_size)[:500]
    with tempfile.TemporaryDirectory(prefix="splash-") as name:
        deployment = Deployment(Path(name), 2, 0.0005, vocab_size)
        connection = http.client.HTTPConnection("127.0.0.1", deployment.frontends.port, timeout=60)
        body = {"prompt": prompt, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        lines = connection.getresponse().read().decode().split("\n\n")
        deployment.end()
    assert lines[-2:] == ["data: [DONE]", ""], lines[-2:]
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-2])
    assert text == tokenizer.decode(prompt * 4), "a stream's text was not that of its tokens"
    return f"a stream of 2,000 tokens had the {len(text)} characters that they stand for"


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    check = harness.checked("streams say what was emitted, and all of it", same_text)
    cases = list(itertools.product(options.streams, options.offered, options.frontends))
    rounds = []
    for _ in range(options.rounds):
        rounds.append([run_case(options, count, num_streams, offered) for num_streams, offered, count in cases])
    rows = [median(found) for found in zip(*rounds, strict=True)]
    lost = sum(int(row["lost"] or 0) for row in rows)
    check = msgspec.structs.replace(
        check, passed=check.passed and lost == 0, detail=f"{check.detail}; {lost} streams were lost"
    )
    config = {name: value for name, value in vars(options).items() if name not in ("remark", "results")}
    settings = harness.without(arguments, "--remark", "--results")
    result = harness.Result(
        schema=harness.SCHEMA_VERSION,
        area="frontend",
        name=options.name,
        title="Tokens from the engine's link to clients",
        provenance=harness.provenance(config, "perf.frontend", settings, options.remark),
        check=check,
        view=VIEW,
        rows=rows,
    )
    report.publish(result, options.results)
    print(report.markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
