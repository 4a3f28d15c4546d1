"""The timeline as a picture: who served when, and what that did to the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws into files, needs no display

from matplotlib.axes import Axes  # noqa: E402 - after the choice above
from matplotlib.figure import Figure  # noqa: E402

from scripts.demo.timeline import Sample, bands, rates  # noqa: E402

COLORS = {"tp": "#4477aa", "dp": "#228833", "cp": "#c07a00", "dop": "#aa3377"}  # told apart by colour-blind eyes too
INK = "#222222"
NARROW = 0.035  # of the width: below it a band's name is written upright


def draw(
    path: Path,
    samples: Sequence[Sample],
    *,
    asked: Sequence[tuple[float, str]],
    events: Sequence[tuple[float, str]],
    title: str,
    footnote: str,
) -> None:
    """Writes a PNG. asked: (seconds, layout) where the demo asked for one. events: (seconds, words) to point at."""
    figure = Figure(figsize=(11, 7.2), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(4, 1, height_ratios=(0.5, 2, 2, 2))
    names = figure.add_subplot(grid[0])
    panels = [figure.add_subplot(grid[i], sharex=names) for i in (1, 2, 3)]
    at = [sample.at for sample in samples]
    _name_bands(names, samples)
    for axes in panels:
        _shade(axes, samples, asked)
    panels[0].fill_between(at, [sample.running for sample in samples], step="post", color=INK, alpha=0.25, linewidth=0)
    panels[0].step(at, [sample.running for sample in samples], where="post", color=INK, linewidth=1.2)
    panels[0].set_ylabel("running\nrequests")
    _point_at(panels[0], events, max(sample.running for sample in samples))
    panels[1].plot(at, rates(samples), color=INK, linewidth=1.4)
    panels[1].set_ylabel("tokens computed\nper second")
    _cache(panels[2], samples)
    for axes in panels:
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[:2]:
        axes.tick_params(labelbottom=False)
    panels[2].set_xlabel("seconds")
    names.set_xlim(at[0], at[-1])
    names.set_title(title, loc="left", fontsize=13, color=INK)
    figure.text(0.01, -0.01, footnote, fontsize=8.5, color="#555555", va="top")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight", pad_inches=0.15)


def _name_bands(axes: Axes, samples: Sequence[Sample]) -> None:
    """The strip on top: one coloured stretch a layout, with its name."""
    whole = samples[-1].at - samples[0].at
    for band in bands(samples):
        axes.axvspan(band.begin, band.end, color=COLORS[band.layout], linewidth=0)
        narrow = band.end - band.begin < NARROW * whole
        axes.text(
            (band.begin + band.end) / 2,
            0.5,
            band.layout.upper(),
            rotation=90 if narrow else 0,
            ha="center",
            va="center",
            color="white",
            fontsize=8 if narrow else 11,
            fontweight="bold",
        )
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_ylabel("layout", rotation=0, ha="right", va="center")
    axes.tick_params(bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)


def _shade(axes: Axes, samples: Sequence[Sample], asked: Sequence[tuple[float, str]]) -> None:
    """The layouts' colours behind a panel, grey where a switch was under way, and a line at each change."""
    stretches = bands(samples)
    for band in stretches:
        axes.axvspan(band.begin, band.end, color=COLORS[band.layout], alpha=0.13, linewidth=0)
    for begin, end in _moving(samples):
        axes.axvspan(begin, end, facecolor="none", edgecolor="#888888", hatch="////", linewidth=0, alpha=0.6)
    for band in stretches[1:]:
        by_demo = any(layout == band.layout and at <= band.begin for at, layout in asked)
        axes.axvline(band.begin, color=INK, linewidth=0.9, linestyle=":" if by_demo else "--")


def _point_at(axes: Axes, events: Sequence[tuple[float, str]], top: float) -> None:
    """Words above an arrow down to the axis at each event; those of the first are beside what it leads to."""
    for i, (at, words) in enumerate(events):
        height = 0.3 if i == 0 else 0.55
        axes.annotate(
            words,
            xy=(at, 0),
            xytext=(at, height * top),
            fontsize=9,
            color=INK,
            va="bottom",
            annotation_clip=False,  # the first event is a moment before the first sample
            bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 2},
            arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 0.9, "relpos": (0, 0)},
        )


def _moving(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """Stretches in which a switch was under way."""
    found: list[tuple[float, float]] = []
    for before, after in zip(samples, samples[1:], strict=False):
        if before.switch == "steady":
            continue
        if found and found[-1][1] == before.at:
            found[-1] = (found[-1][0], after.at)
        else:
            found.append((before.at, after.at))
    return found


def _cache(axes: Axes, samples: Sequence[Sample]) -> None:
    """Cache held by each rank: one line where all hold the same, several where each holds its own."""
    at = [sample.at for sample in samples]
    for rank in range(len(samples[0].used_tokens)):
        held = [sample.used_tokens[rank] for sample in samples]
        # Each thinner than the one before it, so that equal ones show side by side.
        width = 1.2 + 1.6 * (len(samples[0].used_tokens) - 1 - rank)
        axes.step(at, held, where="post", linewidth=width, label=f"rank {rank}", color=f"C{rank}")
    axes.set_ylabel("cache tokens\non each rank")
    axes.margins(y=0.25)  # room for the legend
    axes.legend(loc="upper left", ncols=len(samples[0].used_tokens), fontsize=8, frameon=False)


def footnote(records: Sequence[Mapping[str, Any]], machine: str) -> str:
    """What the marks mean, and what the numbers are."""
    return (
        "Dashed: a switch that the load led to. Dotted: one that the demo asked for. Hatched: a switch under way,"
        f" in which the old layout serves.\n{len(records)} switches in flight. {machine}"
    )
