"""Runs one load under each layout alone, with the layout following the load (auto), and at the ceiling (run.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from splash_trt.capacity.report import CUTS, stored_as
from splash_trt.config import EngineConfig, Layout
from splash_trt.memory.map import capacity
from splash_trt.models.config import ModelConfig
from splash_trt.scheduler.policy import Policy
from splash_trt.simulate.adversary import Adversary
from splash_trt.simulate.engine import StepCost
from splash_trt.simulate.outcome import AUTO, CEILING, Outcome
from splash_trt.simulate.run import Progress, ceiling, longest_request, simulate
from splash_trt.simulate.source import TraceSource
from splash_trt.simulate.traces import Trace

FIRST_LAYOUT = Layout.TP
"""The layout that auto starts in, as `splash-trt serve` does."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Outcomes in the order asked for, the ceiling last, and the assumptions behind them."""

    outcomes: tuple[Outcome, ...]
    capacity_tokens: dict[str, int]
    """Distinct tokens that each layout's cache holds if it is the only one of its deployment."""
    assumptions: tuple[tuple[str, str], ...]
    """(what it is about, text), as they are printed."""

    def speedups(self) -> dict[str, dict[str, float]]:
        """{label: ratios} of every outcome but auto: its makespan over auto's, and its mean latency over auto's."""
        auto = next((o for o in self.outcomes if o.label == AUTO), None)
        if auto is None:
            return {}
        mean = auto.latency_s.mean()
        return {
            o.label: {"makespan": o.makespan_s / auto.makespan_s, "latency": float(o.latency_s.mean() / mean)}
            for o in self.outcomes
            if o is not auto
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "assumptions": dict(self.assumptions),
            "capacity_tokens": self.capacity_tokens,
            "outcomes": [outcome.to_json() for outcome in self.outcomes],
            "auto_faster_by": self.speedups(),
        }


def configs(base: EngineConfig, labels: Sequence[str]) -> dict[str, EngineConfig]:
    """A deployment for each label: a layout's allows that layout alone, so it has all the cache that the layout can
    have; auto's allows the layouts that are named too, or all if none is."""
    alone = [Layout.parse(label) for label in labels if label != AUTO] or list(Layout)
    first = FIRST_LAYOUT if FIRST_LAYOUT in alone else alone[0]
    out: dict[str, EngineConfig] = {}
    for label in labels:
        if label == AUTO:
            out[label] = dataclasses.replace(base, layout=first, layouts=tuple(alone))
        else:
            out[label] = dataclasses.replace(base, layout=Layout.parse(label), layouts=())
    return out


def compare(
    model: ModelConfig,
    base: EngineConfig,
    cost: StepCost,
    load: Trace | Adversary,
    labels: Sequence[str],
    policy: Callable[[EngineConfig], Policy],
    *,
    progress: Callable[[str], Progress] | None = None,
) -> Comparison:
    """Run `load` once for each label, and at the ceiling if auto is among them. policy: makes auto's policy.

    An adversary runs against auto first; the others then get the requests that it sent. Raises ValueError if the model
    or a request does not fit.
    """
    deployments = configs(base, labels)
    limit = min(longest_request(model, config) for config in deployments.values())

    def run(label: str, source: Any) -> Outcome:
        reports = None if progress is None else progress(label)
        if label == CEILING:
            return ceiling(model, deployments[AUTO], cost, source, progress=reports)
        config = deployments[label]
        made = policy(config) if label == AUTO else None
        return simulate(model, config, cost, source, label=label, policy=made, progress=reports)

    outcomes: dict[str, Outcome] = {}
    if isinstance(load, Adversary):
        if AUTO not in deployments:
            raise ValueError("layouts: an adversary needs 'auto' to watch")
        longest = int(load.prompt_tokens.max()) + load.max_output
        if longest > limit:
            raise ValueError(f"trace: adversary: {longest} tokens of one request are above the limit of {limit}")
        outcomes[AUTO] = run(AUTO, load)
        trace, shortened = load.trace, 0
    else:
        trace, shortened = load.clipped(limit)
    for label in [*deployments, *([CEILING] if AUTO in deployments else [])]:
        if label not in outcomes:
            outcomes[label] = run(label, TraceSource(trace))
    room = {
        config.layout.name.lower(): capacity(model, config, config.layout).total_tokens
        for label, config in deployments.items()
        if label != AUTO
    }
    order = [*deployments, CEILING]
    return Comparison(
        outcomes=tuple(outcomes[label] for label in order if label in outcomes),
        capacity_tokens=room,
        assumptions=_assumptions(model, base, trace, limit, shortened),
    )


def _assumptions(
    model: ModelConfig, base: EngineConfig, trace: Trace, limit: int, shortened: int
) -> tuple[tuple[str, str], ...]:
    """The assumptions about load and deployment; the caller adds those about model and device."""
    stored = ", ".join(f"{name} {value}" for name, value in stored_as(base).items())
    cut = f"{shortened} of {trace.num_requests} requests shortened to {limit} tokens, prompt and output together"
    return (
        ("load", f"{trace.name}: {trace.num_requests} requests, {trace.prompt_tokens.sum()} prompt and "
                 f"{trace.output_tokens.sum()} output tokens"),
        *(("load", note) for note in trace.notes),
        ("load", cut if shortened else f"no request above the limit of {limit} tokens, prompt and output together"),
        ("load", "the scheduler and the policy do not know output lengths; requests end by an end-of-text token"),
        ("ranks", f"{base.num_ranks}, each with {base.memory_bytes / 1e9:.1f} GB for weights, workspaces and cache"),
        ("formats", f"{stored}, arithmetic {base.dtype}"),
        *((("experts", CUTS[base.experts_cut]),) if model.experts is not None else ()),
        ("limits", f"{base.max_batch_tokens} tokens a step, {base.max_running} running requests, "
                   f"pages of {base.page_tokens} tokens, {base.plans_in_flight} plans in flight"),
        ("auto", f"starts in {FIRST_LAYOUT.name.lower()}; a switch begins with {base.migration_bytes} bytes a step and "
                 f"may slow steps by {100 * base.migration_max_slowdown:g}%"),
        ("auto", "decides by the same cost model that says how long steps take, unless --policy-device is given"),
        ("prefixes", "no prefix cache: every prompt is computed whole"),
        ("ceiling", "an upper bound that no server can reach: each step in its fastest layout, switching free, the "
                    "roomiest layout's cache, under DP prompts spread evenly over ranks"),
    )  # fmt: skip
