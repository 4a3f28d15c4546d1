"""`python -m scripts.demo`: builds the engine, serves it, watches the layouts, checks the answers and shows the result.
scripts/demo.sh installs what it needs and starts it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import aiohttp
import msgspec

from scripts.demo import load, plot, screen, timeline
from scripts.demo.check import Job, Result, difference
from scripts.demo.client import Answer, Client
from scripts.demo.processes import Failure, free_port, running, tail
from splash_trt.frontend.tokenizer import Tokenizer
from splash_trt.request import Request, SamplingParams

MODEL = Path("models/splash-tiny")
FOLDER = Path("build/demo")
ENGINE = FOLDER / "engine"
PICTURE = FOLDER / "timeline.png"
NUM_RANKS = 4
MIN_SWITCHES = 3
SERVE_FLAGS = (
    *("--ranks", str(NUM_RANKS), "--layout", "auto", "--dtype", "float32", "--memory", "192M"),
    # Small, so that the long prompt takes many steps and its pages are on all ranks.
    *("--max-batch-tokens", "128", "--max-running", "64", "--page-tokens", "16"),
)
POLL_S = 0.1
OUT = sys.stdout
INTRO = """\
Splash-TRT: one small language model on four ranks, which changes its attention layout while requests run.

  TP   every rank computes all tokens with its share of the heads, and all hold the whole cache
  DP   every rank has all heads, and computes and holds the requests that it owns
  CP   every rank has all heads; each request's cache is spread over the ranks, page by page
  DOP  the heads are spread as in TP, each request's cache is on its owner as in DP

What happens now, in about a minute and a half on two idle cores:

  1  build    the engine of models/splash-tiny (5.8 million parameters, trained on Shakespeare and the Bible)
  2  serve    it with four ranks on this machine's CPU: {num_burst} requests at once, {num_long} of them long, and when
              all are done one prompt of {prompt} tokens. The server follows the load by itself; layouts that the
              load has not led to by then are asked for by the demo.
  3  check    every answer again, in float64: with the same switches, and on one rank that never switches
"""


@dataclass(frozen=True, kw_only=True)
class Served:
    """What the server did."""

    answers: list[Answer]
    samples: list[timeline.Sample]
    records: list[dict[str, Any]]
    """The server's own records of its switches."""
    asked: list[tuple[float, str]]


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _on_signal)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    burst = load.burst()
    print(INTRO.format(num_burst=len(burst), num_long=load.NUM_LONG, prompt=load.LONG_PROMPT_TOKENS), flush=True)
    began = time.monotonic()
    try:
        _build()
        served = _serve(burst)
        never, switching = _check(served)
        _show(served)
        failed = _judge(served, never, switching)
    except Failure as failure:
        print(f"\nThe demo failed: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; nothing is left running", file=sys.stderr)
        return 130
    print(f"\n{time.monotonic() - began:.0f} s in all. The timeline is in {PICTURE}, the logs are beside it.")
    return 1 if failed else 0


def _on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _waited(seconds: float, typical_s: float) -> float:
    """A bar's share, from 0 towards 1, for work of which only the elapsed time is known."""
    return seconds / (seconds + typical_s)


def _build() -> None:
    command = ["splash-trt", "build", "--model", str(MODEL), "--out", str(ENGINE)]
    print(f"$ {' '.join(command)}")
    log = FOLDER / "build.log"
    with screen.part(OUT, "1 build") as part, running(command, log) as process:
        while process.poll() is None:
            part.update(_waited(part.seconds, 3.0))
            time.sleep(POLL_S)
        if process.returncode != 0:
            raise Failure(f"the build ended with exit code {process.returncode}; its log ends:\n{tail(log)}")


def _serve(burst: Sequence[load.Ask]) -> Served:
    """Starts the server, drives it, and ends it."""
    port = free_port()
    command = ["splash-trt", "serve", "--engine", str(ENGINE), *SERVE_FLAGS, "--port", str(port)]
    print(f"$ {' '.join(command)}")
    log = FOLDER / "serve.log"
    with screen.part(OUT, "2 serve") as part, running(command, log) as process:
        client = Client(f"http://127.0.0.1:{port}", process, lambda client: _show_progress(part, client, burst))
        try:
            return asyncio.run(_drive(client, part, burst))
        except (Failure, aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise Failure(f"{error or type(error).__name__}; the server's log ends:\n{tail(log)}") from error


async def _drive(client: Client, part: screen.Part, burst: Sequence[load.Ask]) -> Served:
    async with client:
        await client.ready(lambda seconds: part.update(0.0, "the ranks start: each imports torch, takes its weights"))
        part.say(f"  ready after {part.seconds:.0f} s; {len(burst)} requests go out")
        await client.run(burst, lambda answers: load.long_prompt([answer.tokens for answer in answers]))
        records = await client.switches()
    return Served(answers=client.answers, samples=client.samples, records=records, asked=client.asked)


def _show_progress(part: screen.Part, client: Client, burst: Sequence[load.Ask]) -> None:
    """Shows a new sample: moves the bar, and prints a line if the layout has changed."""
    sample = client.samples[-1]
    if len(client.samples) > 1 and sample.layout != client.samples[-2].layout:
        asker = "asked for by the demo" if sample.layout in (name for _, name in client.asked) else "by itself"
        change = f"{client.samples[-2].layout.upper():>3} -> {sample.layout.upper():<3}"
        part.say(f"  {sample.at:5.1f} s  {change}  {sample.running:2} requests running, {asker}")
    whole = sum(ask.max_tokens for ask in burst) + load.LONG_PROMPT_TOKENS + load.LAST_TOKENS
    rate = timeline.rates(client.samples)[-1]
    note = f"{sample.layout.upper():<3}  {sample.running:2} running  {rate:4.0f} tokens/s"
    part.update(min(0.99, sample.computed_total / whole), note)


def _requests(answers: Sequence[Answer]) -> list[Request]:
    """The same requests in token ids, as the server's frontend made them."""
    tokenizer = Tokenizer(ENGINE / "tokenizer")
    requests = []
    for ask in (answer.ask for answer in answers):
        if ask.speaker is not None:
            ids = tokenizer.encode_chat(tokenizer.chat_template.render([{"role": "user", "content": ask.speaker}]))
        else:
            ids = tokenizer.encode(ask.prompt) if isinstance(ask.prompt, str) else list(ask.prompt)
        sampling = SamplingParams(max_tokens=ask.max_tokens, temperature=ask.temperature, seed=ask.seed)
        requests.append(Request(id=ask.name, prompt=tuple(ids), sampling=sampling))
    return requests


def _check(served: Served) -> tuple[Result, Result]:
    """Runs the check: without switches, and repeating the server's switches, both at the same time."""
    *first, last = _requests(served.answers)
    switches = timeline.replay(served.samples)
    jobs = {
        "never": Job(model=str(MODEL), ranks=1, first=[*first, last], then=[], switches=[]),
        "switching": Job(model=str(MODEL), ranks=NUM_RANKS, first=first, then=[last], switches=switches),
    }
    whole = sum(len(answer.tokens) for answer in served.answers) * len(jobs)
    with screen.part(OUT, "3 check") as part, ExitStack() as stack:
        processes = []
        for name, job in jobs.items():
            files = [_file(name, "job"), _file(name, "result")]
            files[0].write_bytes(msgspec.json.encode(job))
            command = [sys.executable, "-m", "scripts.demo.check", *map(str, files)]
            processes.append(stack.enter_context(running(command, FOLDER / f"{name}.log")))
        while any(process.poll() is None for process in processes):
            done = sum(_last_number(FOLDER / f"{name}.log") for name in jobs)
            part.update(min(0.99, done / whole), f"{done} tokens in float64")
            time.sleep(POLL_S)
        for name, process in zip(jobs, processes, strict=True):
            if process.returncode != 0:
                why = f"the check's run {name!r} ended with exit code {process.returncode}"
                raise Failure(f"{why}; its log ends:\n{tail(FOLDER / f'{name}.log')}")
    never, switching = (msgspec.json.decode(_file(name, "result").read_bytes(), type=Result) for name in jobs)
    return never, switching


def _file(run: str, kind: str) -> Path:
    return FOLDER / f"{run}.{kind}.json"


def _last_number(log: Path) -> int:
    lines = log.read_bytes().split(b"\n") if log.exists() else []
    return int(lines[-2]) if len(lines) > 1 and lines[-2].isdigit() else 0


def _show(served: Served) -> None:
    """Shows the table, the switches, some answers and the picture."""
    cores = len(os.sched_getaffinity(0))
    machine = f"This machine, {cores} cores: CPU numbers. They show that it works, not how fast GPUs are."
    print(f"\n{screen.table(timeline.rows(served.samples, served.records))}")
    print("tokens: prompt and output. Each layout had other work to do, so these rows do not compare layouts.")
    print(f"stall: how much later than usual the first step after a switch began.\n{machine}")
    print("\nWhy the layout changed:")
    for record in timeline.committed(served.records):
        change = f"{record['source'].upper():>3} -> {record['target'].upper():<3}"
        moved = screen.size(sum(record["bytes_between_ranks"].values()))
        print(f"  {change}  {moved:>8} in {sum(record['seconds_in'].values()):.1f} s  {record['why']}")
    by_name = {answer.ask.name: answer for answer in served.answers}
    print("\nSome of what it said, sampled unless it says greedy:")
    for name in ("chat Hamlet", "chat Lady Macbeth", "long 1", "long prompt"):
        _show_text(by_name[name])
    records = timeline.committed(served.records)
    title = f"One model on {NUM_RANKS} ranks, its attention layout following the load"
    events = [
        (served.answers[0].began, f" {len(served.answers) - 1} requests arrive"),
        (served.answers[-1].began, f" one prompt of {load.LONG_PROMPT_TOKENS:,} tokens"),
    ]
    note = plot.footnote(records, machine)
    plot.draw(PICTURE, served.samples, asked=served.asked, events=events, title=title, footnote=note)


def _show_text(answer: Answer) -> None:
    ask = answer.ask
    prompt = ask.prompt if isinstance(ask.prompt, str) else f"… {len(ask.prompt)} tokens of its own, greedy …"
    begin = f"{ask.speaker.upper()}: " if ask.speaker is not None else f"[{prompt}]"
    text = " / ".join(line for line in (begin + answer.text).split("\n") if line.strip())
    wrapped = textwrap.wrap(text, 106, initial_indent="  | ", subsequent_indent="  | ")
    print("\n".join(wrapped[:4] + ["  | …"] * (len(wrapped) > 4)) + "\n")


def _judge(served: Served, never: Result, switching: Result) -> bool:
    """Prints the check's result; returns whether the demo failed."""
    count = len(served.answers)
    names = " ".join(layout.upper() for layout in switching.layouts)
    print(f"Checked in float64: {count} answers on four ranks ({names}) against one rank that never switches.")
    wrong = {name: difference(switching.tokens[name], want) for name, want in never.tokens.items()}
    wrong = {name: at for name, at in wrong.items() if at is not None}
    for name, at in wrong.items():
        print(f"  DIFFERENT: {name!r} from its token {at} on")
    if not wrong:
        tokens = sum(len(told) for told in never.tokens.values())
        print(f"  all {count} are equal, token for token ({tokens} tokens)")
    same = sum(answer.tokens == never.tokens[answer.ask.name] for answer in served.answers)
    print(f"The server's float32 answers: {same} of {count} equal those; near ties may fall the other way in float32.")
    lacking = [
        f"{who}: it saw only {', '.join(seen)} and {switches} switches"
        for who, seen, switches in (
            ("the server", {s.layout for s in served.samples}, len(timeline.committed(served.records))),
            ("the check", set(switching.layouts), len(switching.layouts) - 1),
        )
        if len(seen) < len(timeline.LAYOUTS) or switches < MIN_SWITCHES
    ]
    for text in lacking:
        print(f"  TOO LITTLE: {text}")
    return bool(wrong or lacking)


if __name__ == "__main__":
    sys.exit(main())
