"""Plots of a comparison. They need matplotlib, from the [perf] extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from splash_trt.config import EngineConfig, Layout
from splash_trt.models.config import ModelConfig
from splash_trt.simulate.compare import Comparison
from splash_trt.simulate.engine import StepCost
from splash_trt.simulate.grid import LAYOUTS, NO_ROOM, best_layouts, holds, rooms, seconds
from splash_trt.simulate.outcome import AUTO, CEILING, Outcome

# Okabe and Ito's palette, which people with any kind of colour blindness can tell apart.
COLOURS = {Layout.TP: "#0072B2", Layout.DP: "#E69F00", Layout.CP: "#009E73", Layout.DOP: "#CC79A7"}
DARK = "#222222"
MARKERS = {Layout.TP: "o", Layout.DP: "s", Layout.CP: "^", Layout.DOP: "D"}
DPI = 130
PROMPTS = (0, 4096, 32768, 131072)
CONTEXTS = tuple(round(2 ** (n / 2)) for n in range(18, 35))  # 512 to 128K
CONCURRENCIES = tuple(dict.fromkeys(round(2 ** (n / 3)) for n in range(37)))  # 1 to 4096
FOURFOLD = tuple(4**n for n in range(7))
WINDOWS = 80  # points of the throughput curve


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files only; ValueError if there is none."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plots: matplotlib is not installed; pip install 'splash-trt[perf]' brings it") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw(
    folder: Path, comparison: Comparison, model: ModelConfig, config: EngineConfig, cost: StepCost, title: str
) -> list[Path]:
    """Draws all plots into `folder`; returns their paths. ValueError without matplotlib, OSError if a file cannot be
    written."""
    plt = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, figure in (
        ("timeline", timeline(plt, comparison, title)),
        ("tpot", tpot(plt, model, config, cost, title)),
        ("map", best_map(plt, model, config, cost, title)),
    ):
        made.append(folder / f"{name}.png")
        figure.savefig(made[-1], dpi=DPI)
        plt.close(figure)
    return made


def timeline(plt: Any, comparison: Comparison, title: str) -> Any:
    """Over time: auto's layout, the throughput of all but the ceiling, and auto's requests and share of the cache in
    use."""
    shown = next((o for o in comparison.outcomes if o.label == AUTO), comparison.outcomes[0])
    figure, axes = plt.subplots(
        4, 1, figsize=(11, 9), sharex=True, height_ratios=(0.55, 2, 1.5, 1.2), layout="constrained"
    )
    figure.suptitle(title, fontsize=11)
    _band(axes[0], shown)
    for outcome in comparison.outcomes:
        if outcome.label != CEILING:
            _throughput(axes[1], outcome, thick=outcome is shown)
    axes[1].set_ylabel("output tokens/s")
    s = shown.series
    axes[2].plot(s.time_s, s.running, color=DARK, lw=1.3, label="running")
    axes[2].plot(s.time_s, s.waiting, color="#D55E00", lw=1.1, ls="--", label="waiting")
    axes[2].set_ylabel(f"requests ({shown.label})")
    axes[3].fill_between(s.time_s, np.array(s.cache) * 100, color="#56B4E9", alpha=0.6, lw=0)
    axes[3].set_ylabel(f"cache in use, %\n({shown.label})")
    axes[3].set_ylim(0, 103)
    axes[3].set_xlabel("seconds")
    axes[3].set_xlim(0, max(o.makespan_s for o in comparison.outcomes if o.label != CEILING))
    for axis in axes[1:]:
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    for axis in axes[:3]:
        axis.legend(loc="center left", bbox_to_anchor=(1.005, 0.5), frameon=False, fontsize=9)
    figure.align_ylabels(axes)
    return figure


def _band(axis: Any, outcome: Outcome) -> None:
    """The layout as a coloured band."""
    changes = [*outcome.layout_changes, (outcome.makespan_s, NO_ROOM)]
    named: set[Layout] = set()
    for (begin, number), (end, _) in zip(changes, changes[1:], strict=False):
        layout = Layout(number)
        label = None if layout in named else layout.name.lower()
        named.add(layout)
        axis.axvspan(begin, end, color=COLOURS[layout], lw=0, label=label)
    axis.set_yticks([])
    axis.set_ylabel(f"layout\n({outcome.label})")


def _throughput(axis: Any, outcome: Outcome, *, thick: bool) -> None:
    """Output tokens per second, over windows of equal time."""
    time = np.array([0.0, *outcome.series.time_s])
    tokens = np.array([0, *outcome.series.output])
    edges = np.linspace(0, outcome.makespan_s, WINDOWS + 1)
    rate = np.diff(np.interp(edges, time, tokens)) / np.diff(edges)
    middle = (edges[1:] + edges[:-1]) / 2
    if thick:
        axis.plot(middle, rate, color=DARK, lw=1.8, ls=(0, (5, 1.2)), label=outcome.label, zorder=3)
    else:
        colour = COLOURS[Layout.parse(outcome.label)]
        axis.plot(middle, rate, color=colour, lw=1.8, label=outcome.label, alpha=0.85)


def tpot(plt: Any, model: ModelConfig, config: EngineConfig, cost: StepCost, title: str) -> Any:
    """A decode step's time over concurrency, up to what each layout's cache holds, for three contexts."""
    contexts, found = (1024, 8192, 65536), rooms(model, config)
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.6), sharey=True, layout="constrained")
    figure.suptitle(f"{title}: time per output token, from the cost model", fontsize=11)
    for axis, context in zip(axes, contexts, strict=True):
        for layout, room in found.items():
            counts = [c for c in CONCURRENCIES if holds(room, config.num_ranks, c, context, 0)]
            times = [seconds(cost, config, layout, c, context, 0) * 1e3 for c in counts]
            look = {"color": COLOURS[layout], "marker": MARKERS[layout], "ms": 4.5, "lw": 1.5}
            axis.plot(counts, times, label=layout.name.lower(), **look)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(FOURFOLD, [str(c) for c in FOURFOLD])
        axis.set_title(f"context {_tokens(context)} tokens", fontsize=10)
        axis.set_xlabel("running requests")
        axis.grid(alpha=0.3, which="both")
        axis.yaxis.set_major_formatter(plt.FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(plt.FuncFormatter(lambda value, _: f"{value:g}" * (f"{value:e}"[0] in "25")))
    axes[0].set_ylabel("ms per output token")
    axes[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, title="until the\ncache is full")
    return figure


def best_map(plt: Any, model: ModelConfig, config: EngineConfig, cost: StepCost, title: str) -> Any:
    """The fastest layout over concurrency and context, one panel per prompt length; paler where the second is hardly
    slower."""
    longest = config.context_of(model.max_positions)
    prompts = [prompt for prompt in PROMPTS if prompt < longest]
    contexts = [context for context in CONTEXTS if context <= longest]
    found = best_layouts(model, config, cost, prompts=prompts, contexts=contexts, concurrencies=CONCURRENCIES)
    figure, axes = plt.subplots(
        1, len(prompts), figsize=(3.6 * len(prompts) + 1.4, 4.8), sharey=True, layout="constrained", squeeze=False
    )
    figure.suptitle(f"{title}: the fastest layout that has room, by the cost model", fontsize=11)
    for axis, prompt, best, gain in zip(axes[0], prompts, found.best, found.gain, strict=True):
        axis.imshow(_shades(best, gain), origin="lower", aspect="auto", interpolation="nearest")
        axis.set_xticks(range(0, len(contexts), 4), [_tokens(c) for c in contexts[::4]])
        axis.set_yticks([CONCURRENCIES.index(c) for c in FOURFOLD], [str(c) for c in FOURFOLD])
        axis.set_xlabel("context of running requests, tokens")
        what = f"and a prompt of {_tokens(prompt)} tokens" if prompt else "decode only"
        axis.set_title(what, fontsize=10)
    axes[0][0].set_ylabel("running requests")
    patches = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[layout], label=layout.name.lower()) for layout in LAYOUTS]
    patches.append(plt.Rectangle((0, 0), 1, 1, color="#DDDDDD", label="no room"))
    heading = "full colour:\n20 % faster\nthan the next,\nor alone in\nhaving room"
    figure.legend(handles=patches, loc="outside right center", frameon=False, title=heading)
    return figure


FULL_GAIN = 0.2


def _shades(best: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """[Y, X, 3]: the best layout's colour, towards white where the gain over the next is small."""
    image = np.full((*best.shape, 3), 0xDD / 255)
    for layout in LAYOUTS:
        colour = np.array([int(COLOURS[layout][i : i + 2], 16) / 255 for i in (1, 3, 5)])
        strength = 0.35 + 0.65 * np.clip((gain - 1) / FULL_GAIN, 0, 1)[..., None]
        mine = best == layout
        image[mine] = (1 - strength * (1 - colour))[mine]
    return image


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count >= 1024 else str(count)
