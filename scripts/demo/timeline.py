"""What the demo saw of the server over time, and what follows from it. Pure functions; times are seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LAYOUTS = ("tp", "dp", "cp", "dop")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The server's state at second `at` of the run."""

    at: float
    layout: str
    switch: str
    """"steady", or the state of the switch under way."""
    running: int
    used_tokens: tuple[int, ...]
    """Cache tokens held on each rank, in whole pages."""
    computed: Mapping[str, float]
    """Tokens computed so far, prompt and output, by the layout that computed them."""

    @property
    def computed_total(self) -> float:
        return sum(self.computed.values())


@dataclass(frozen=True, kw_only=True)
class Band:
    """A stretch of time under one layout."""

    layout: str
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout's line in the table."""

    layout: str
    share: float
    """Share of the time, 0 to 1."""
    tokens_per_s: float
    """Tokens computed under it, prompt and output, over its time."""
    switches_to: int
    bytes_moved: int
    """Bytes that the switches to it moved between ranks."""
    longest_stall_s: float | None
    """The longest stall of the switches to it; None if none was measured."""


def bands(samples: Sequence[Sample]) -> list[Band]:
    """Stretches of equal layout, end to end; a change is put where it was first seen."""
    found: list[Band] = []
    for i, sample in enumerate(samples):
        end = samples[i + 1].at if i + 1 < len(samples) else sample.at
        if found and found[-1].layout == sample.layout:
            found[-1] = Band(layout=sample.layout, begin=found[-1].begin, end=end)
        else:
            found.append(Band(layout=sample.layout, begin=sample.at, end=end))
    return found


def rates(samples: Sequence[Sample], window_s: float = 1.5) -> list[float]:
    """Tokens computed per second, over the last window_s before each sample."""
    result, first = [], 0
    for i, sample in enumerate(samples):
        while first < i and samples[first].at < sample.at - window_s:
            first += 1
        begin = samples[max(0, first - 1)]
        took = sample.at - begin.at
        result.append((sample.computed_total - begin.computed_total) / took if took > 0 else 0.0)
    return result


def committed(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The switches that took effect, oldest first."""
    return sorted((r for r in records if r["outcome"] == "committed"), key=lambda r: r["number"])


def rows(samples: Sequence[Sample], records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each layout that served or was switched to. records: as GET /v1/switches tells them."""
    stretches, done = bands(samples), committed(records)
    whole = samples[-1].at - samples[0].at
    result = []
    for layout in LAYOUTS:
        time_s = sum(band.end - band.begin for band in stretches if band.layout == layout)
        mine = [record for record in done if record["target"] == layout]
        tokens = samples[-1].computed.get(layout, 0.0) - samples[0].computed.get(layout, 0.0)
        stalls = [record["stall_s"] for record in mine if record["stall_s"] is not None]
        if not (time_s or mine):
            continue
        row = Row(
            layout=layout,
            share=time_s / whole if whole else 0.0,
            tokens_per_s=tokens / time_s if time_s else 0.0,
            switches_to=len(mine),
            bytes_moved=sum(sum(record["bytes_between_ranks"].values()) for record in mine),
            longest_stall_s=max(stalls, default=None),
        )
        result.append(row)
    return result


def replay(samples: Sequence[Sample]) -> list[tuple[int, str]]:
    """The layout changes as (tokens computed when the change was about to come, layout), for another run to repeat."""
    changes = []
    for before, after in zip(samples, samples[1:], strict=False):
        if after.layout != before.layout:
            begin = before.computed_total - samples[0].computed_total
            changes.append((int(begin), after.layout))
    return changes


def unvisited(visited: Sequence[str]) -> list[str]:
    """Layouts that have not served yet, in the order in which the demo asks for them."""
    return [layout for layout in ("dp", "cp", "dop", "tp") if layout not in visited]
