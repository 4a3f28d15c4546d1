"""What a training run leaves behind beside the weights: training.json and the loss curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402


def write_report(folder: Path, summary: dict[str, Any]) -> None:
    """Write `summary` as training.json; `curve` in it holds [step, train, held-out] in bits per byte."""
    (folder / "training.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def plot_losses(path: Path, curve: list[tuple[int, float, float]], baselines: dict[str, float]) -> None:
    """Draw training and held-out bits per byte over steps, with each baseline as a level line."""
    figure, axes = plt.subplots(figsize=(7, 4))
    steps = [row[0] for row in curve]
    axes.plot(steps, [row[1] for row in curve], label="training text (with dropout)", color="tab:gray")
    axes.plot(steps, [row[2] for row in curve], label="held-out works", color="tab:blue")
    for (name, value), color in zip(baselines.items(), ("tab:red", "tab:orange", "tab:green"), strict=False):
        axes.axhline(value, label=f"{name}: {value:.2f}", color=color, linestyle="--", linewidth=1)
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(1.2, 3.2))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
