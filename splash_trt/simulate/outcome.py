"""The figures by which a simulated run is judged."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from splash_trt.layout.switch import Record
from splash_trt.simulate.tally import Series

AUTO = "auto"
CEILING = "ceiling"


def percentile(values: np.ndarray, percent: float) -> float:
    """A percentile of the values that are not NaN, interpolated; NaN if there is none."""
    known = values[~np.isnan(values)]
    return float(np.percentile(known, percent)) if len(known) else float("nan")


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """One run of R requests. Times in seconds; arrays [R] float64 by request."""

    label: str
    """A layout's name, AUTO or CEILING."""
    makespan_s: float
    """From the start to the last token."""
    prompt_tokens: int
    output_tokens: int
    """Of all requests, like prompt_tokens; tokens that are computed twice count once."""
    ttft_s: np.ndarray
    """From arrival to the first token."""
    tpot_s: np.ndarray
    """Time from the first token to the last, per token after the first; NaN if there is only one token."""
    latency_s: np.ndarray
    """From arrival to the last token."""
    gap_p50_s: float
    gap_p99_s: float
    """Percentiles, over all tokens, of the time since the previous token of the same request."""
    gap_max_s: float
    steps: int
    recomputed: int
    """How often a running request had to give up its cache, which was computed again later."""
    layout_share: dict[str, float]
    """Share of the steps' time, by layout."""
    num_switches: int
    switches: tuple[Record, ...]
    """The latest ones, if there were many."""
    layout_changes: tuple[tuple[float, int], ...]
    """(time, layout) from which on steps ran under another layout."""
    series: Series

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.makespan_s

    @property
    def worst_stall_s(self) -> float:
        """The longest stall of the switches whose stall is known, in seconds; 0 if there are none."""
        return max((record.stall_s for record in self.switches if record.stall_s is not None), default=0.0)

    def summary(self) -> dict[str, Any]:
        """Plain values for a table or JSON."""
        out: dict[str, Any] = {
            "layout": self.label,
            "requests": len(self.latency_s),
            "makespan_s": self.makespan_s,
            "output_tokens_per_s": self.throughput,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
        }
        for name, values in (("ttft", self.ttft_s), ("tpot", self.tpot_s), ("latency", self.latency_s)):
            known = values[~np.isnan(values)]
            out[f"{name}_mean_s"] = float(known.mean()) if len(known) else None
            for percent in (50, 90, 99):
                out[f"{name}_p{percent}_s"] = percentile(values, percent) if len(known) else None
        out |= {
            "token_gap_p50_s": self.gap_p50_s,
            "token_gap_p99_s": self.gap_p99_s,
            "token_gap_max_s": self.gap_max_s,
            "steps": self.steps,
            "recomputed": self.recomputed,
            "layout_share": self.layout_share,
            "num_switches": self.num_switches,
            "worst_stall_s": self.worst_stall_s,
        }
        return out

    def to_json(self) -> dict[str, Any]:
        """Everything but the times of single requests."""
        records = [dataclasses.asdict(record) for record in self.switches]
        return self.summary() | {
            "switches": records,
            "layout_changes": [list(change) for change in self.layout_changes],
            "series": dataclasses.asdict(self.series),
        }

    def to_bytes(self) -> bytes:
        """Everything; equal runs give equal bytes."""
        head = json.dumps(self.to_json(), sort_keys=True).encode()
        return head + b"".join(values.tobytes() for values in (self.ttft_s, self.tpot_s, self.latency_s))
