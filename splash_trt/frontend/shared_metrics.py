"""Metrics of several frontends of one engine, added up: whichever is scraped, the answer is for all of them.

Each writes what it has counted to a file, once a second and when it is scraped; the one that is scraped adds up the
files. So no total ever decreases, whichever frontend is scraped: Prometheus would take that for a restart. A frontend
that replaces a dead one goes on from its file. What the engine reports to all is counted by frontend 0 only; what it
reported while that one was being restarted, it reports again.
"""

from __future__ import annotations

import copy
import operator
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from splash_trt.frontend.member import Member
from splash_trt.lifeline import COUNTS_PREFIX
from splash_trt.observe.switches import Counted

PUBLISH_S = 1.0
STALE_S = 5.0  # gauges of a frontend that has written nothing for so long are left out

Key = tuple[str, tuple[tuple[str, str], ...]]


class Family(msgspec.Struct):
    """A metric with its samples: (name, labels, value)."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


class Snapshot(msgspec.Struct, kw_only=True):
    """All that one frontend has counted up to `now_s` on the monotonic clock."""

    now_s: float
    counted: Counted
    """How far `engine` has come."""
    engine: list[Family]
    requests: list[Family]
    process: list[Family]


class Registries:
    """A frontend's metrics by how several frontends share them. engine: counted from what the engine reports to all
    frontends. requests: of those that this frontend serves. process: of this process. state: the engine's present
    state, which every frontend knows."""

    def __init__(self) -> None:
        self.engine = CollectorRegistry()
        self.requests = CollectorRegistry()
        self.process = CollectorRegistry()
        self.state = CollectorRegistry()


class SharedMetrics(Collector):
    """All of a frontend's metrics; with `member`, those of its siblings as well. Any thread may use it."""

    def __init__(self, registries: Registries, member: Member | None) -> None:
        self._own = registries
        self._member = member
        self._lock = threading.Lock()
        self.counting = threading.Lock()
        """Held while `counted` and the engine's counters change together."""
        before = None if member is None else _read(_path(member, member.number))
        self.counted = before.counted if before is not None else Counted()
        self._engine_before = _values(before.engine) if before is not None else {}
        self._requests_before = _values(before.requests) if before is not None else {}

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that a registry does not call `collect` on registration."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._own.state.collect()
        member, own = self._member, self.publish()
        found = {0: own}
        if member is not None:
            others = {n: _read(_path(member, n)) for n in range(member.count) if n != member.number}
            found = {n: snapshot for n, snapshot in others.items() if snapshot is not None}
            found[member.number] = own
        if 0 in found:
            yield from map(_metric, found[0].engine)
        yield from map(_metric, _sum([found[number] for number in sorted(found)], own.now_s))
        yield from map(_metric, _side_by_side(found, own.now_s))

    def publish(self) -> Snapshot:
        """Writes what has been counted so far for the siblings, and returns it."""
        with self._lock:
            with self.counting:
                engine, counted = _families(self._own.engine, self._engine_before), copy.deepcopy(self.counted)
            snapshot = Snapshot(
                now_s=time.monotonic(),
                counted=counted,
                engine=engine,
                requests=_families(self._own.requests, self._requests_before),
                process=_families(self._own.process, {}),
            )
            if self._member is not None:
                path = _path(self._member, self._member.number)
                part = path.with_suffix(".part")
                with suppress(OSError):  # the folder is gone: the run ends
                    part.write_bytes(msgspec.msgpack.encode(snapshot))
                    os.replace(part, path)
            return snapshot


def _path(member: Member, number: int) -> Path:
    return Path(member.folder) / f"{COUNTS_PREFIX}{number}"


def _read(path: Path) -> Snapshot | None:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Snapshot)
    except OSError:  # that frontend has not written yet
        return None


def _families(registry: CollectorRegistry, before: dict[Key, float]) -> list[Family]:
    """The registry's metrics. The values `before` are added to counters and histograms, but not to gauges."""
    families = []
    for metric in registry.collect():
        samples = [(sample.name, sample.labels, sample.value) for sample in metric.samples]
        families.append(Family(metric.name, metric.documentation, metric.type, samples))
    if before:
        _add(families, before)
    return families


def _add(families: list[Family], before: dict[Key, float]) -> None:
    for family in families:
        if family.kind == "gauge":
            continue
        names = {name for name, _, _ in family.samples} | {f"{family.name}{end}" for end in _ENDS}
        old = {key: value for key, value in before.items() if key[0] in names}
        family.samples = _merge([[(*_pair(key), value) for key, value in old.items()], family.samples])


_ENDS = ("_total", "_bucket", "_count", "_sum", "_created")


def _pair(key: Key) -> tuple[str, dict[str, str]]:
    return key[0], dict(key[1])


def _values(families: list[Family]) -> dict[Key, float]:
    return {
        (name, tuple(labels.items())): value
        for family in families
        if family.kind != "gauge"
        for name, labels, value in family.samples
    }


def _sum(snapshots: list[Snapshot], now_s: float) -> list[Family]:
    """The sums of all snapshots' request metrics. Gauges in stale snapshots are left out."""
    sums: dict[str, list[tuple[Family, bool]]] = {}
    for snapshot in snapshots:
        for family in snapshot.requests:
            sums.setdefault(family.name, []).append((family, snapshot.now_s >= now_s - STALE_S))
    families = []
    for parts in sums.values():
        first = parts[0][0]
        samples = _merge([part.samples for part, is_new in parts if is_new or part.kind != "gauge"])
        families.append(Family(first.name, first.text, first.kind, samples))
    return families


def _side_by_side(snapshots: dict[int, Snapshot], now_s: float) -> list[Family]:
    """The metrics of all processes, with a label for the frontend if there are several. Stale ones are left out."""
    families: dict[str, Family] = {}
    for number, snapshot in sorted(snapshots.items()):
        labels = {} if len(snapshots) == 1 else {"frontend": str(number)}
        for family in snapshot.process if snapshot.now_s >= now_s - STALE_S else ():
            shown = families.setdefault(family.name, Family(family.name, family.text, family.kind, []))
            shown.samples += [(name, {**own, **labels}, value) for name, own, value in family.samples]
    return list(families.values())


def _merge(parts: list[list[tuple[str, dict[str, str], float]]]) -> list[tuple[str, dict[str, str], float]]:
    """Adds up the values of samples with equal names and labels; of times of creation, takes the earliest."""
    values: dict[Key, float] = {}
    for samples in parts:
        for name, labels, value in samples:
            key = (name, tuple(labels.items()))
            combine: Callable[[float, float], float] = min if name.endswith("_created") else operator.add
            values[key] = combine(values[key], value) if key in values else value
    return [(*_pair(key), value) for key, value in values.items()]


def _metric(family: Family) -> Metric:
    metric = Metric(family.name, family.text, family.kind)
    metric.samples = [Sample(*sample) for sample in family.samples]
    return metric
