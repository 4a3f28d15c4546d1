"""What all benchmarks share: the provenance of numbers, how times are measured, and the form that results are kept in.

A result is written only together with its provenance and with the correctness check that ran in the same run, and only
if that check passed; `read` refuses a file without them. Times are seconds from a monotonic clock in code, milliseconds
in files.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from splash_trt import environment
from splash_trt.launch import mpirun_command

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "perf" / "results"
SCHEMA_VERSION = 1
_NAME = re.compile(r"[a-z0-9_]+")

Scalar = str | int | float | bool | None
Row = dict[str, Scalar]


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cpu: str
    cores: int
    """How many this process may use."""
    memory_gib: int
    gpus: tuple[str, ...]
    """Name and driver version of each."""


class Software(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Versions; an empty string if a package is not installed."""

    system: str
    python: str
    torch: str
    numpy: str
    mpi4py: str
    mpi: str


class Commit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    dirty: bool
    """Whether files other than results differed from the commit or were not in it."""


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    hardware: Hardware
    software: Software
    commit: Commit
    config: dict[str, Any]
    """All settings: model, sizes, repeats and so on."""
    command: str
    """The command that repeats the run, from the repository's root."""
    date_utc: str
    remark: str
    """What a reader of the numbers has to know besides, such as what else the machine was doing."""


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The correctness check that ran on the measured code, in the same run."""

    what: str
    passed: bool
    detail: str


class View(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How report.py shows the rows: a panel for each value of the columns `panels`, a line for each of `series`."""

    x: str
    y: str
    series: str
    panels: tuple[str, ...]
    ratio: str | None = None
    """A column that is shown in brackets after y."""


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: int
    area: str
    name: str
    title: str
    provenance: Provenance
    check: Check
    view: View
    rows: list[Row]


# Where numbers come from


def provenance(config: Mapping[str, Any], module: str, arguments: Sequence[str], remark: str) -> Provenance:
    """The provenance of a run of `python -m module arguments…` on this machine, now."""
    return Provenance(
        hardware=hardware(),
        software=software(),
        commit=commit(),
        config=dict(config),
        command=f"python -m {module} {shlex.join(arguments)}".strip(),
        date_utc=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        remark=remark,
    )


def without(arguments: Sequence[str], *options: str) -> list[str]:
    """A command's arguments without these options, which have no influence on the numbers. Each takes one value, as
    `--option value` or `--option=value`."""
    kept, words = [], iter(arguments)
    for word in words:
        if word in options:
            next(words, None)
        elif word.partition("=")[0] not in options:
            kept.append(word)
    return kept


def hardware() -> Hardware:
    from_proc = _proc_field("/proc/cpuinfo", "model name")
    memory_kib = int((_proc_field("/proc/meminfo", "MemTotal") or "0").split()[0])
    return Hardware(
        cpu=from_proc or platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(memory_kib / (1 << 20)),
        gpus=_gpus(),
    )


def software() -> Software:
    return Software(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=_version("torch"),
        numpy=_version("numpy"),
        mpi4py=_version("mpi4py"),
        mpi=_mpi(),
    )


def commit(root: Path = ROOT) -> Commit:
    """The repository's commit. RuntimeError outside a git repository: numbers of unknown code are worth nothing."""
    changed = _git(root, "status", "--porcelain", "--", ".", ":!perf/results")
    return Commit(id=_git(root, "rev-parse", "HEAD"), dirty=bool(changed))


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def _proc_field(path: str, name: str) -> str:
    """A field of a /proc file; an empty string if there is none."""
    if not Path(path).exists():
        return ""
    found = re.search(rf"^{name}\s*:\s*(.*)$", Path(path).read_text(), re.MULTILINE)
    return found[1].strip() if found else ""


def _gpus() -> tuple[str, ...]:
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return tuple(subprocess.run(query, capture_output=True, text=True).stdout.split("\n"))[:-1]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _mpi() -> str:
    try:
        mpirun = mpirun_command(1, [])[0]
    except FileNotFoundError:
        return ""
    answer = subprocess.run([mpirun, "--version"], capture_output=True, text=True, env=environment.for_mpirun())
    return answer.stdout.split("\n")[0].replace("mpirun (", "").replace(")", "").strip()


# How times are measured


def timed(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Callable[[], list[float]]:
    """A variant for `interleave`: a round's only sample is the time of one call."""

    def sample() -> list[float]:
        begin = clock()
        call()
        return [clock() - begin]

    return sample


def interleave(
    variants: Mapping[str, Callable[[], Sequence[float]]], *, warmup: int, repeats: int
) -> dict[str, list[list[float]]]:
    """Seconds by variant and round. A variant's function measures one round of samples.

    All variants run in every round, in an order that rotates by one each time, so that whatever else the machine does
    affects all of them alike. The first `warmup` rounds are discarded.
    """
    names = list(variants)
    samples: dict[str, list[list[float]]] = {name: [] for name in names}
    for turn in range(warmup + repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found = list(variants[name]())
            if turn >= warmup:
                samples[name].append(found)
    return samples


def summary(rounds: Sequence[Sequence[float]]) -> dict[str, float | int]:
    """median_ms, p10_ms, p90_ms and the number of samples, over all rounds' seconds."""
    values = np.concatenate([np.asarray(part, np.float64) for part in rounds]) * 1e3
    p10, median, p90 = np.percentile(values, [10, 50, 90]).tolist()
    return {"median_ms": median, "p10_ms": p10, "p90_ms": p90, "samples": len(values)}


def ratio(rounds: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> float:
    """How many times as long as `base` it took: the median over rounds of the ratio of the round's two medians."""
    return float(np.median([np.median(a) / np.median(b) for a, b in zip(rounds, base, strict=True)]))


# How results are kept


def checked(what: str, call: Callable[[], str]) -> Check:
    """Runs a correctness check. `call` returns what it found, or raises an AssertionError that says it."""
    try:
        return Check(what=what, passed=True, detail=call())
    except AssertionError as error:
        return Check(what=what, passed=False, detail=str(error))


def write(result: Result, results: Path = RESULTS) -> Path:
    """Writes <results>/<area>/<name>.json. ValueError, with the reason, if the result is refused."""
    _refuse_bad(result)
    data = msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"
    _refuse_private(data.decode())
    path = results / result.area / f"{result.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def read(path: Path) -> Result:
    """Reads a result. ValueError if it has another schema, or lacks its provenance or check."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=Result)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path.name}: {error}") from error
    _refuse_bad(result)
    return result


def _refuse_bad(result: Result) -> None:
    where = f"{result.area}/{result.name}"
    if not _NAME.fullmatch(result.area) or not _NAME.fullmatch(result.name):
        raise ValueError(f"{where}: area and name are made of a-z, 0-9 and _")
    if result.schema != SCHEMA_VERSION:
        raise ValueError(f"{where}: schema {result.schema} is not {SCHEMA_VERSION}")
    if not result.check.what or not result.check.detail:
        raise ValueError(f"{where}: check: no correctness check ran; a number of unchecked code is not kept")
    if not result.check.passed:
        raise ValueError(f"{where}: check: failed, so the numbers are not kept: {result.check.detail}")
    p = result.provenance
    needed = {"command": p.command, "commit": p.commit.id, "date_utc": p.date_utc, "cpu": p.hardware.cpu}
    for name, value in needed.items():
        if not value:
            raise ValueError(f"{where}: provenance: {name} is empty")
    if not p.config:
        raise ValueError(f"{where}: provenance: config is empty")
    if not result.rows:
        raise ValueError(f"{where}: rows: there are none")


def _refuse_private(text: str) -> None:
    """ValueError if a result's text names this machine or its folders: results are published."""
    names = {socket.gethostname(), str(Path.home()), str(ROOT), sys.prefix} - {"", "/", "localhost"}
    for name in sorted(names):
        if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text):
            raise ValueError(f"the result holds {name!r}, a host name or a folder of this machine")
