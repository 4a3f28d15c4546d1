"""Plots of perf/policy.py's results. They need the [perf] extra."""

from __future__ import annotations

from pathlib import Path

from perf.harness import Result
from splash_trt.simulate.outcome import AUTO, CEILING

MARKS = {"tp": "o", "dp": "s", "cp": "^", "dop": "D", AUTO: "_", CEILING: "x"}


def plot_cases(result: Result, path: Path) -> None:
    """A column for each load, sorted by how much auto gains: each layout's time over the best fixed layout's."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(str(row["kind"]) for row in result.rows))
    figure = Figure(figsize=(10, 4 * len(kinds)), layout="constrained")
    for axis, kind in zip(figure.subplots(len(kinds), 1, squeeze=False)[:, 0], kinds, strict=True):
        found: dict[str, dict[int, float]] = {}
        for row in result.rows:
            if row["kind"] == kind:
                number, value = int(row["number"] or 0), float(row["over_best"] or 0)
                found.setdefault(str(row["layout"]), {})[number] = value
        order = sorted(found[AUTO], key=found[AUTO].__getitem__)
        for name, values in found.items():
            big = name == AUTO
            axis.plot(
                range(len(order)),
                [values[number] for number in order],
                linestyle="none",
                marker=MARKS[name],
                ms=12 if big else 5,
                mew=2.5 if big else 1,
                color="black" if big else None,
                label=name,
            )
        axis.axhline(1.0, color="grey", lw=0.8)
        axis.set(yscale="log", ylabel="time over the best fixed layout's", xlabel=f"{kind} loads, by auto's value")
        ticks = [0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0]
        low, high = axis.get_ylim()
        axis.set_yticks([t for t in ticks if low <= t <= high], [f"{t:g}" for t in ticks if low <= t <= high])
        axis.minorticks_off()
        axis.set_xticks(range(len(order)), [str(number) for number in order], fontsize=6)
        axis.legend(fontsize=8, ncols=len(found))
        axis.grid(alpha=0.3, axis="y")
    figure.suptitle(result.title)
    figure.savefig(path, dpi=90, metadata={"Software": None})
