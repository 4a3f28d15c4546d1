"""A snapshot as text: the same facts as on the dashboard, in the same order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from splash_trt.frontend.dashboard.history import Switch, Timeline
from splash_trt.link import Status
from splash_trt.top.client import Snapshot
from splash_trt.top.words import NONE, count, duration, percent, short, signed, size

COLOURS = {"tp": "blue", "dp": "yellow", "cp": "green", "dop": "magenta"}
LABEL = 18
MAX_SWITCHES = 10
RATE_S = 5


@dataclass(frozen=True)
class Style:
    """plain: only ASCII, for a terminal or pipe that takes nothing else."""

    plain: bool = False

    @property
    def arrow(self) -> str:
        return "->" if self.plain else "→"

    @property
    def levels(self) -> str:
        """Characters of a graph, from empty to full."""
        return " .:-=+*#" if self.plain else " ▁▂▃▄▅▆▇█"

    @property
    def bar(self) -> tuple[str, str]:
        return ("#", ".") if self.plain else ("█", "░")


def view(snapshot: Snapshot, style: Style, width: int, window_s: int) -> RenderableType:
    """The whole screen. width: of the terminal, in characters; window_s: how far back graphs go."""
    status, timeline = snapshot.layout.status, snapshot.timeline
    head = Text(f"Splash-TRT  {snapshot.model}", style="bold")
    if status is None:
        return Group(head, Text("the engine has not said how it stands"))
    parts: list[RenderableType] = [head, _now(status, timeline), Text()]
    parts += _graphs(timeline, style, max(20, width - LABEL), window_s)
    parts += [Text(), _under_way(status, timeline, style), Text(), _ranks(status, style, width)]
    parts += [Text(), *_why(snapshot.layout.explain, status)]
    if timeline.switches:
        parts += [Text(), _switches(timeline, style)]
    return Group(*parts)


def _name(layout: str | None) -> str:
    return (layout or "none").upper()


def _layout(layout: str | None) -> Text:
    return Text(_name(layout), style=f"bold {COLOURS.get(layout or '', 'default')}")


def _now(status: Status, timeline: Timeline) -> Text:
    tokens, output = (
        sum(values[-RATE_S:]) / RATE_S for values in (timeline.seconds.tokens, timeline.seconds.output_tokens)
    )
    used, total = sum(status.used_tokens), sum(status.total_tokens)
    return Text.assemble(
        "layout ", _layout(status.layout), f" ({status.mode})",
        f"   running {status.running}   queued {status.waiting}",
        f"   tokens/s {count(tokens)} ({count(output)} output)   cache held {percent(used / total if total else None)}",
    )  # fmt: skip


def _graphs(timeline: Timeline, style: Style, cells: int, window_s: int) -> list[RenderableType]:
    """Graphs over the last window_s, `cells` characters wide; a character is at least one second."""
    step = -(-window_s // cells)
    end = timeline.next // step * step  # so that a character stands for the same seconds in later snapshots
    begins = [second for second in range(end - window_s // step * step, end, step)]
    band = Text("layout".ljust(LABEL))
    last = None
    names: list[str] = []
    for begin in begins:
        layout, switching = _phase(timeline, begin, begin + step)
        if layout != last:
            names, last = list(_name(layout)) if layout else [], layout
        mark = names.pop(0) if names else "~" if switching else ("-" if style.plain else "─") if layout else " "
        band.append(mark, style=COLOURS.get(layout or "", "default"))
    lines: list[RenderableType] = [band]
    for title, values, is_rate in (
        ("output tokens/s", timeline.seconds.output_tokens, True),
        ("tokens/s", timeline.seconds.tokens, True),
        ("running", timeline.seconds.running, False),
        ("queued", timeline.seconds.waiting, False),
    ):
        folded = [_fold(values, begin - timeline.seconds.first, step, is_rate) for begin in begins]
        lines.append(Text(title.ljust(LABEL) + _sparkline(folded, style) + f" {count(max(folded, default=0))}"))
    ago = f"{duration(window_s)} ago"
    lines.append(Text(" " * LABEL + ago + "now".rjust(max(4, len(begins) - len(ago))), style="dim"))
    return lines


def _phase(timeline: Timeline, begin: int, end: int) -> tuple[str | None, bool]:
    """The layout at the end of seconds [begin, end), and whether a switch was under way in them."""
    layout, switching = None, False
    for index, phase in enumerate(timeline.phases):
        until = timeline.phases[index + 1].since_s if index + 1 < len(timeline.phases) else float("inf")
        if phase.since_s < end and until > begin:
            layout, switching = phase.layout, switching or phase.switch != "steady"
    return layout, switching


def _fold(values: list[int], index: int, step: int, is_rate: bool) -> float:
    part = values[max(0, index) : max(0, index + step)]
    if not part:
        return 0.0
    return sum(part) / len(part) if is_rate else max(part)


def _sparkline(values: list[float], style: Style) -> str:
    most, levels = max([1.0, *values]), style.levels
    return "".join(levels[min(len(levels) - 1, -int(-value * (len(levels) - 1) // most))] for value in values)


def _bar(share: float, cells: int, style: Style) -> str:
    full, empty = style.bar
    filled = min(cells, round(share * cells)) or (1 if share > 0 else 0)
    return full * filled + empty * (cells - filled)


def _under_way(status: Status, timeline: Timeline, style: Style) -> Text:
    if status.switch == "steady":
        return Text("switch    none under way")
    record: dict[str, Any] = next((s.record for s in reversed(timeline.switches) if not s.record.get("ended")), {})
    planned, progress = _bytes(record), status.switch_progress
    moved = f"; about {size(planned * progress)} of {size(planned)}" if planned else ""
    return Text.assemble(
        "switch    ", _layout(status.layout), f" {style.arrow} ", _layout(status.switch_target),
        f"  {status.switch}  {_bar(progress, 20, style)} {percent(progress)} of the rows moved{moved}",
    )  # fmt: skip


def _table(*columns: str, texts: int) -> Table:
    """A table whose first `texts` columns are text, aligned to the left, and the others numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < texts else "right", no_wrap=True)
    return table


def _ranks(status: Status, style: Style, width: int) -> Table:
    table = _table("rank", "cache", "held", "tokens held", "free", "limit", "running", texts=2)
    cells = max(8, min(40, width - 70))
    for rank, (used, limit) in enumerate(zip(status.used_tokens, status.total_tokens, strict=True)):
        share = used / limit if limit else 0.0
        numbers = (percent(share), count(used), count(limit - used), count(limit), str(status.running_by_rank[rank]))
        table.add_row(str(rank), _bar(share, cells, style), *numbers)
    return table


def _why(explain: Any, status: Status) -> list[RenderableType]:
    if not isinstance(explain, dict):
        return [Text("why       the engine is in a long step and has not said")]
    policy = explain.get("policy") or {}
    verdict = policy.get("verdict") or "this deployment has no policy"
    if status.mode == "pinned":
        verdict = f"{_name(status.layout)} is pinned; the load does not change it"
    lines: list[RenderableType] = [Text(f"why       {verdict}")]
    if explain.get("why"):
        lines.append(Text(f"          the switch under way: {explain['why']}"))
    candidates = policy.get("candidates") or []
    if candidates:
        table = _table("layout", "gain", "step", "switch costs", "takes", "moves", "room, tokens", texts=1)
        for candidate in candidates:
            switch = candidate["switch"]
            moves = switch["steps"] > 0
            name = _layout(candidate["layout"])
            name.append(" owners" if candidate["moves_owners"] else "" if moves else " stay", style="not bold default")
            table.add_row(
                name,
                signed(candidate["gain_s"]) if candidate["fits"] else "no room",
                duration(candidate["phases"][0]["p99_step_s"] if candidate["phases"] else None),
                *(
                    (duration(switch["cost_s"]), duration(switch["seconds"]), size(switch["bytes"]))
                    if moves
                    else (NONE,) * 3
                ),
                short(candidate["room_tokens"]),
            )
        lines.append(table)
    return lines


def _switches(timeline: Timeline, style: Style) -> Table:
    table = _table("switches", "from, to", "outcome", "took", "moved", "slowdown", "stall", texts=3)
    table.add_column("why", overflow="fold")
    newest = sorted(timeline.switches, key=lambda switch: -switch.began_s)
    for switch in newest[:MAX_SWITCHES]:
        table.add_row(*_switch_row(switch, timeline.now_s, style))
    return table


def _switch_row(switch: Switch, now_s: float, style: Style) -> list[RenderableType]:
    record = switch.record
    ends = Text.assemble(_layout(record.get("source")), f" {style.arrow} ", _layout(record.get("target")))
    if record.get("source") == record.get("target"):
        ends = Text.assemble(_layout(record.get("source")), " owners")
    outcome = str(record.get("outcome"))
    colour = "green" if outcome == "committed" else "red" if record.get("ended") else "default"
    return [
        f"{duration(round(now_s - switch.began_s))} ago",
        ends,
        Text(outcome.partition(":")[0], style=colour),
        duration(sum((record.get("seconds_in") or {}).values()) if record.get("ended") else None),
        size(_bytes(record)),
        percent(record.get("slowdown")),
        duration(record.get("stall_s")),
        f"{record.get('why')}{outcome.partition(':')[2] and f' ({outcome})'}",
    ]


def _bytes(record: dict[str, Any]) -> float:
    return sum((record.get("bytes_between_ranks") or {}).values()) + (record.get("bytes_inside_ranks") or 0)
