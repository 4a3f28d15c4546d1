"""Figures to compare with published ones: capacity, the fastest layout by regime, and auto's gain over fixed layouts.

The published ones are gains of 1.3 to 1.73 times in throughput, and 27 to 60 % more cache in DOP than in DP.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

import msgspec

from perf import harness, report
from perf.policy_loads import DEPLOYMENTS, FIXED, KINDS, LABELS, Deployment
from perf.policy_study import Case, cases, line, same_twice
from splash_trt.config import Layout
from splash_trt.scheduler.cost_model import CostModel
from splash_trt.simulate import grid
from splash_trt.simulate.outcome import AUTO

CONCURRENCIES = (1, 8, 32, 128, 512, 1024)
CONTEXT = 4096
PROMPTS = (8192, 32768, 131072)
FULL_CONTEXTS = (8192, 32768, 131072)
DECODE, PROMPT, CACHE = "decode step, ms", "first token, s", "cache, million tokens"
FULL = "tokens/s of a full cache"

REGIMES_VIEW = harness.View(x="size", y="value", series="layout", panels=("figure", "where"), ratio="over_best")
LOADS_VIEW = harness.View(x="where", y="output_tokens_per_s", series="layout", panels=("load",), ratio="auto_faster_by")


def regimes(where: Deployment) -> list[harness.Row]:
    """Rows on a deployment's layouts from the cost model and the memory map alone, without scheduler and switches."""
    cost, base, room = CostModel(where.model, where.base, where.device), where.base, where.room()
    found: list[harness.Row] = []

    def add(figure: str, size: int, values: dict[str, float], best: float) -> None:
        for name, value in values.items():
            row: harness.Row = {"where": str(where), "figure": figure, "size": size, "layout": name}
            found.append(row | {"value": round(value, 4), "over_best": round(value / best, 3)})

    rooms = grid.rooms(where.model, base)
    for count in CONCURRENCIES:
        holding = [layout for layout in Layout if grid.holds(rooms[layout], base.num_ranks, count, CONTEXT, 0)]
        times = {x.name.lower(): grid.seconds(cost, base, x, count, CONTEXT, 0) * 1e3 for x in holding}
        add(DECODE, count, times, min(times.values()))
    for prompt in PROMPTS:
        times = {layout.name.lower(): grid.seconds(cost, base, layout, 0, 0, prompt) for layout in Layout}
        add(PROMPT, prompt, times, min(times.values()))
    for context in FULL_CONTEXTS:
        counts = {layout: room[layout.name.lower()] // context for layout in Layout}
        rates = {x.name.lower(): n / grid.seconds(cost, base, x, n, context, 0) for x, n in counts.items() if n}
        add(FULL, context, rates, max(rates.values()))
    millions = {name: tokens / 1e6 for name, tokens in room.items()}
    add(CACHE, 0, millions, millions["dp"])
    return found


def regimes_summary(rows: Sequence[harness.Row]) -> dict[str, str | float]:
    """For each figure and size the layouts, best first, with their value over the best one's; and by how many percent
    DOP's cache is larger than DP's."""
    out: dict[str, str | float] = {}
    for where in dict.fromkeys(str(row["where"]) for row in rows):
        mine = [row for row in rows if row["where"] == where]
        for figure in (DECODE, PROMPT, FULL):
            sizes = dict.fromkeys(row["size"] for row in mine if row["figure"] == figure)
            for size in sizes:
                some = {
                    row["layout"]: row["over_best"] for row in mine if (row["figure"], row["size"]) == (figure, size)
                }
                out[f"{where}: {figure}, {size}"] = ", ".join(
                    f"{name} {over}" for name, over in sorted(some.items(), key=lambda item: float(item[1] or 0))
                )
        room = {row["layout"]: float(row["value"] or 0) for row in mine if row["figure"] == CACHE}
        out[f"{where}: DOP's cache over DP's, %"] = round((room["dop"] / room["dp"] - 1) * 100, 1)
    return out


def load_rows(case: Case) -> list[harness.Row]:
    auto = case.runs[AUTO]
    return [
        {
            "load": case.kind,
            "where": str(case.where),
            "layout": label,
            "output_tokens_per_s": round(run.output_tokens / run.makespan_s, 1),
            "auto_faster_by": round(run.makespan_s / auto.makespan_s, 3),
            "auto_latency_better_by": round(run.latency_s / auto.latency_s, 3),
            "makespan_s": round(run.makespan_s, 2),
            "latency_mean_s": round(run.latency_s, 3),
            "recomputed": run.recomputed,
            "steps": run.steps,
        }
        for label, run in ((label, case.runs[label]) for label in LABELS)
    ]


def loads_summary(found: Sequence[Case]) -> dict[str, str]:
    """For each load, auto's throughput over each fixed layout's, and its share of the ceiling's."""
    return {
        f"{case.kind}, {case.where}": ", ".join(
            f"{name} {case.runs[name].makespan_s / case.runs[AUTO].makespan_s:.3f}" for name in FIXED
        )
        + f"; of the ceiling {case.ceiling_share:.3f}"
        for case in found
    }


def assumptions(where: Deployment) -> dict[str, object]:
    """Everything that the deployment's numbers depend on, by name."""
    base = where.base
    config = {name: value for name, value in dataclasses.asdict(base).items() if name not in ("layout", "layouts")}
    device = {name: value for name, value in dataclasses.asdict(where.device).items() if name != "provenance"}
    return {"config": config, "device": device}


def published(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    settings = harness.without(arguments, "--remark", "--state", "--results")
    config: dict[str, object] = {
        "loads": {kind: KINDS[kind] for kind in options.kinds},
        "load_seed": 1,
        "prefixes": "no prefix cache: every prompt is computed whole",
        "auto": "starts in TP, goes for throughput, knows no output lengths, reckons with the devices as they are",
        "deployments": {str(where): assumptions(where) for where in DEPLOYMENTS},
    }
    origin = harness.provenance(config, "perf.policy", settings, options.remark)
    check = harness.checked("the same load twice, under all layouts", same_twice)
    rows = [row for where in DEPLOYMENTS for row in regimes(where)]
    paths = [
        keep("regimes", "Which layout is fastest, and which holds most", REGIMES_VIEW, rows, origin, check, options)
    ]
    wanted = [(kind, number) for number in options.deployments for kind in options.kinds]
    found = cases(wanted, 1.0, options.state, options.jobs, lambda case: print(line(case), flush=True))
    if found:
        rows = [row for case in found for row in load_rows(case)]
        title = "Following the load on three kinds of load: output tokens per second (auto is faster by)"
        paths.append(keep("published", title, LOADS_VIEW, rows, origin, check, options, loads_summary(found)))
    print("Wrote", *paths)
    return 0


def keep(
    name: str,
    title: str,
    view: harness.View,
    rows: list[harness.Row],
    origin: harness.Provenance,
    check: harness.Check,
    options: argparse.Namespace,
    summary: dict[str, str] | None = None,
) -> str:
    figures = summary if summary is not None else regimes_summary(rows)
    for what, value in figures.items():
        print(f"{what}: {value}")
    result = harness.Result(
        schema=harness.SCHEMA_VERSION,
        area="policy",
        name=name,
        title=title,
        provenance=msgspec.structs.replace(origin, config={**origin.config, "summary": figures}),
        check=check,
        view=view,
        rows=rows,
    )
    path = harness.write(result, options.results)
    path.with_suffix(".md").write_text(report.markdown(result), encoding="utf-8")
    return path.name
