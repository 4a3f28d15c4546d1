"""Writes a markdown table and a plot beside each result: `python -m perf.report [file …]`, by default for all results.

The plot needs the [perf] extra.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from perf.harness import RESULTS, Result, Row, Scalar, read, write


def _values(rows: Sequence[Row], *columns: str) -> list[tuple[Scalar, ...]]:
    """The distinct combinations of the columns' values, in order of appearance."""
    return list(dict.fromkeys(tuple(row[column] for column in columns) for row in rows))


def _number(value: Scalar) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def markdown(result: Result) -> str:
    """A table with a column for each value of `series`, and the provenance below it."""
    view, p = result.view, result.provenance
    index = (*view.panels, view.x)
    series = [value[0] for value in _values(result.rows, view.series)]
    cells = {(tuple(row[c] for c in index), row[view.series]): row for row in result.rows}
    behind = f" ({view.ratio})" if view.ratio else ""
    lines = [f"# {result.title}", "", f"Each cell: {view.y}{behind}.", ""]
    lines += ["| " + " | ".join([*index, *map(str, series)]) + " |", "|" + "---|" * (len(index) + len(series))]
    for key in _values(result.rows, *index):
        shown = []
        for name in series:
            row = cells.get((key, name))
            ratio = row.get(view.ratio) if row is not None and view.ratio else None
            shown.append("" if row is None else _number(row[view.y]) + (f" ({ratio:.2f})" if ratio else ""))
        lines.append("| " + " | ".join([*map(_number, key), *shown]) + " |")
    h, s = p.hardware, p.software
    gpus = "; ".join(h.gpus) or "none"
    lines += [
        "",
        f"- Check: {result.check.what}: {'passed' if result.check.passed else 'FAILED'}, {result.check.detail}.",
        f"- Machine: {h.cores} cores, {h.cpu}, {h.memory_gib} GiB; GPUs: {gpus}.",
        f"- {s.system}, Python {s.python}, torch {s.torch}, numpy {s.numpy}, mpi4py {s.mpi4py}, {s.mpi or 'no MPI'}.",
        f"- Commit {p.commit.id[:12]}{', with changes not committed' if p.commit.dirty else ''}; {p.date_utc}.",
        f"- Repeat: `{p.command}`",
        f"- {p.remark}",
        "",
    ]
    return "\n".join(lines)


Line = tuple[list[float], list[float]]


def lines(result: Result) -> dict[str, dict[str, Line]]:
    """What is plotted: by panel (its title) and series, the values of x and of y."""
    view = result.view
    out: dict[str, dict[str, Line]] = {}
    for row in result.rows:
        title = ", ".join(f"{column} {row[column]}" for column in view.panels)
        x, y = out.setdefault(title, {}).setdefault(str(row[view.series]), ([], []))
        x.append(float(row[view.x] or 0))
        y.append(float(row[view.y] or 0))
    return out


def plot(result: Result, path: Path, columns: int = 3) -> None:
    """A panel for each value of view.panels, a line for each of view.series; axes are logarithmic if values allow."""
    from matplotlib.figure import Figure

    panels = lines(result)
    height = -(-len(panels) // columns)
    figure = Figure(figsize=(4 * columns, 2.8 * height), layout="constrained")
    axes = figure.subplots(height, columns, squeeze=False).flatten().tolist()
    for axis, (title, series) in zip(axes, panels.items(), strict=False):
        for name, (x, y) in series.items():
            axis.plot(x, y, marker="o", ms=3, label=name)
        scales = [_scale([value for line in series.values() for value in line[i]]) for i in (0, 1)]
        axis.set(xscale=scales[0], yscale=scales[1], xlabel=result.view.x, ylabel=result.view.y)
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.suptitle(result.title)
    figure.savefig(path, dpi=80, metadata={"Software": None})


def _scale(values: Sequence[float]) -> str:
    return "log" if max(values) > 0 and min(values) >= 0 else "linear"


def write_report(path: Path) -> tuple[Path, Path]:
    """Writes .md and .png beside a result's .json and returns their paths. ValueError if the result is refused."""
    result = read(path)
    table, picture = path.with_suffix(".md"), path.with_suffix(".png")
    table.write_text(markdown(result) + f"\n![{result.title}]({picture.name})\n", encoding="utf-8")
    plot(result, picture)
    return table, picture


def publish(result: Result, root: Path) -> Path:
    """Writes a result and its report below `root`; returns the result's file. ValueError as in harness.write."""
    path = write(result, root)
    write_report(path)
    return path


def main(arguments: Sequence[str]) -> int:
    code = 0
    for path in [Path(a) for a in arguments] or sorted(RESULTS.glob("*/*.json")):
        try:
            print(*write_report(path), sep="\n")
        except ValueError as error:
            print(f"refused: {error}", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
