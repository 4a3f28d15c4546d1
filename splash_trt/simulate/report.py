"""A comparison as text: one line per run, what auto did, and the assumptions."""

from __future__ import annotations

from collections.abc import Sequence

from splash_trt.simulate.compare import Comparison
from splash_trt.simulate.outcome import AUTO, CEILING, Outcome

HEADINGS = (
    "layout", "makespan s", "output tok/s", "TTFT p50 s", "p99 s", "TPOT p50 ms", "p99 ms", "gap p99 ms", "recomputed"
)  # fmt: skip
SHOWN_SWITCHES = 12


def text(comparison: Comparison) -> str:
    """The whole report."""
    lines = [*table(comparison), ""]
    auto = next((o for o in comparison.outcomes if o.label == AUTO), None)
    if auto is not None:
        lines += [*_auto(auto), *_speedups(comparison), ""]
    ceiling = next((o for o in comparison.outcomes if o.label == CEILING), None)
    if ceiling is not None:
        lines += [f"ceiling: {_shares(ceiling)}", ""]
    held = ", ".join(f"{name} {tokens:,}" for name, tokens in comparison.capacity_tokens.items())
    if held:
        lines += [f"cache, distinct tokens: {held}", ""]
    lines.append("What this rests on:")
    width = max(len(what) for what, _ in comparison.assumptions)
    lines += [f"  {what:{width}}  {value}" for what, value in comparison.assumptions]
    return "\n".join(lines)


def table(comparison: Comparison) -> list[str]:
    """The outcomes as aligned lines, below the headings."""
    return aligned([HEADINGS, *(_row(outcome) for outcome in comparison.outcomes)])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns, the first column to the left, the others to the right, and a rule below line one."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def _row(o: Outcome) -> tuple[str, ...]:
    s = o.summary()

    def number(name: str, scale: float = 1.0, digits: int = 2) -> str:
        return "-" if s[name] is None else f"{s[name] * scale:.{digits}f}"

    return (
        o.label,
        f"{o.makespan_s:.1f}",
        f"{o.throughput:.0f}",
        number("ttft_p50_s", digits=3),
        number("ttft_p99_s", digits=3),
        number("tpot_p50_s", 1e3),
        number("tpot_p99_s", 1e3),
        number("token_gap_p99_s", 1e3),
        str(o.recomputed),
    )


def _auto(auto: Outcome) -> list[str]:
    done = [r for r in auto.switches if r.outcome == "committed"]
    lines = [
        f"auto: {_shares(auto)}",
        f"auto: {auto.num_switches} switches tried, {len(done)} of the latest {len(auto.switches)} committed; worst "
        f"stall {auto.worst_stall_s * 1e3:.2f} ms, longest wait between two tokens of a request "
        f"{auto.gap_max_s * 1e3:.1f} ms",
    ]
    for record in auto.switches[:SHOWN_SWITCHES]:
        seconds = sum(record.seconds_in.values())
        moved = sum(record.bytes_between_ranks.values()) / 1e6
        lines.append(
            f"  {record.number}: {record.source} -> {record.target}, {record.outcome} after {seconds:.2f} s, "
            f"{moved:.0f} MB moved: {record.why}"
        )
    if len(auto.switches) > SHOWN_SWITCHES:
        lines.append(f"  … and {len(auto.switches) - SHOWN_SWITCHES} more (all in --json)")
    return lines


def _shares(outcome: Outcome) -> str:
    shares = sorted(outcome.layout_share.items(), key=lambda item: -item[1])
    return "share of the steps' time: " + ", ".join(f"{name} {share:.1%}" for name, share in shares)


def _speedups(comparison: Comparison) -> list[str]:
    lines = []
    for label, by in comparison.speedups().items():
        if label == CEILING:
            lines.append(f"auto reaches {by['makespan']:.1%} of the ceiling's speed")
        else:
            lines.append(
                f"auto against {label}: {by['makespan']:.3f}x to the last token, {by['latency']:.3f}x for the mean "
                "request"
            )
    return lines
