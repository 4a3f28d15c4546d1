"""Counts layout switches from rank 0's reports: each switch once, however often it is reported."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram

from splash_trt.link import SwitchReport, Totals

MAX_KEPT = 1000
"""How many records of the latest switches are kept."""

# Few buckets, since there is a histogram for each of up to 12 (source, target), times states or kinds.
_STATE_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)
_BYTES = (0, *(1 << shift for shift in range(12, 37, 4)))  # 4 KiB to 64 GiB
_RATIO = (0.95, 1, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 5)
_STALL_S = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1)


class Counted(msgspec.Struct):
    """How much of an engine's news has been counted: of steps these totals, of switches the ends and stalls so far."""

    incarnation: str = ""  # empty: no engine has told anything
    totals: Totals = {}
    ended_to: int = 0  # a switch's number
    stalled_to: int = 0

    def begin(self, incarnation: str) -> None:
        self.incarnation, self.totals, self.ended_to, self.stalled_to = incarnation, {}, 0, 0


class SwitchMetrics:
    """Keeps the records, newest `MAX_KEPT`, and what Prometheus is told. Bytes are those planned.

    counted: how far switches have been counted, which it carries on.
    """

    def __init__(self, registry: CollectorRegistry, counted: Counted) -> None:
        ends = ["source", "target"]

        def counter(name: str, help_text: str, labels: list[str]) -> Counter:
            return Counter(f"splash_{name}", help_text, labels, registry=registry)

        def histogram(name: str, help_text: str, labels: list[str], buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"splash_switch_{name}", help_text, labels, buckets=buckets, registry=registry)

        self._switches = counter("switches", "Layout switches that ended", [*ends, "outcome"])
        self._aborts = counter("switch_aborts", "Layout switches aborted, by why", [*ends, "reason"])
        help_text = "Bytes that switches planned to move between ranks (inside: within a rank)"
        self._bytes = counter("switch_bytes", help_text, ["kind"])
        self._size = histogram("moved_bytes", "The same of one switch", [*ends, "kind"], _BYTES)
        self._seconds = histogram("seconds", "From a switch's begin to its end", [*ends, "outcome"], _STATE_S)
        self._state_s = histogram("state_seconds", "Time that a switch spent in a state", [*ends, "state"], _STATE_S)
        help_text = "Time of steps that moved something over what they would have taken otherwise; 1: no slower"
        self._step_ratio = histogram("step_time_ratio", help_text, ends, _RATIO)
        help_text = "The slowest rank's gap before the first step in the new layout, less the median gap"
        self._stall_s = histogram("stall_seconds", help_text, ends, _STALL_S)
        self._records: dict[int, dict[str, object]] = {}
        self._counted = counted

    def records(self) -> list[dict[str, object]]:
        """The records, newest first."""
        return [self._records[number] for number in sorted(self._records, reverse=True)]

    def on_restart(self) -> None:
        """A new engine numbers its switches from 1 again: forgets the records, but keeps what was counted."""
        self._records.clear()

    def on_report(self, report: SwitchReport) -> None:
        """Takes a report. Switches end one at a time, in order; a stall is reported at the end or soon after."""
        record, number = report.record, report.number
        self._records[number] = record
        while len(self._records) > MAX_KEPT:
            del self._records[min(self._records)]
        ends = (str(record.get("source")), str(record.get("target")))
        stall_s = _number(record.get("stall_s"))
        if stall_s is not None and number > self._counted.stalled_to:
            self._counted.stalled_to = number
            self._stall_s.labels(*ends).observe(stall_s)
        if record.get("ended") and number > self._counted.ended_to:
            self._counted.ended_to = number
            self._count(ends, record)

    def _count(self, ends: tuple[str, str], record: dict[str, object]) -> None:
        # Without the reason for an abort: there are too many of them for a label.
        outcome = str(record.get("outcome")).partition(":")[0]
        self._switches.labels(*ends, outcome).inc()
        if outcome == "aborted":
            self._aborts.labels(*ends, str(record.get("abort") or "unknown")).inc()
        states = _numbers(record.get("seconds_in"))
        for state, seconds in states.items():
            self._state_s.labels(*ends, state).observe(seconds)
        if states:
            self._seconds.labels(*ends, outcome).observe(sum(states.values()))
        kinds = _numbers(record.get("bytes_between_ranks"))
        inside = _number(record.get("bytes_inside_ranks"))
        if inside is not None:
            kinds["inside"] = inside
        for kind, num_bytes in kinds.items():
            self._bytes.labels(kind).inc(num_bytes)
            self._size.labels(*ends, kind).observe(num_bytes)
        slowdown = _number(record.get("slowdown"))
        if slowdown is not None:
            self._step_ratio.labels(*ends).observe(1 + slowdown)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _numbers(value: object) -> dict[str, float]:
    pairs = value.items() if isinstance(value, dict) else ()
    return {str(name): float(number) for name, number in pairs if isinstance(number, int | float)}
