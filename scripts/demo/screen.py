"""What the demo prints: a progress bar for each part of the work, lines between, and the table."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from scripts.demo.timeline import Row

BAR_WIDTH = 24
LINE_WIDTH = 110
NOTE_S = 15.0  # between two lines of progress, where lines cannot be rewritten


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """share: 0 to 1."""
    full = round(max(0.0, min(1.0, share)) * width)
    return "█" * full + "░" * (width - full)


def size(num_bytes: float) -> str:
    """Bytes for people to read, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"


def table(rows: Sequence[Row]) -> str:
    """The layouts side by side, and their sums in the last line."""
    heads = ("layout", "share of time", "tokens/s", "switches to it", "bytes moved", "longest stall")
    lines = [
        (
            row.layout.upper(),
            f"{row.share:.0%}",
            f"{row.tokens_per_s:.0f}",
            str(row.switches_to),
            size(row.bytes_moved),
            _stall(row.longest_stall_s),
        )
        for row in rows
    ]
    stalls = [row.longest_stall_s for row in rows if row.longest_stall_s is not None]
    total = (
        "all",
        f"{sum(row.share for row in rows):.0%}",
        f"{sum(row.share * row.tokens_per_s for row in rows):.0f}",
        str(sum(row.switches_to for row in rows)),
        size(sum(row.bytes_moved for row in rows)),
        _stall(max(stalls, default=None)),
    )
    widths = [max(len(line[i]) for line in (heads, *lines, total)) for i in range(len(heads))]
    rule = "  ".join("─" * width for width in widths)
    return "\n".join([_line(heads, widths), rule, *(_line(line, widths) for line in lines), rule, _line(total, widths)])


def _stall(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    others = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return "  ".join([cells[0].ljust(widths[0]), *others])


class Part:
    """One part of the work under way: its bar is redrawn in place, where the output is a terminal."""

    def __init__(self, out: TextIO, name: str) -> None:
        self._out = out
        self._name = name
        self._began = self._noted = time.monotonic()
        self._share = 0.0
        self._note = ""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def update(self, share: float, note: str = "") -> None:
        self._share, self._note = share, note
        if self._out.isatty():
            self._draw()
        elif time.monotonic() - self._noted > NOTE_S:
            self._noted = time.monotonic()
            print(f"{self._name}  {share:4.0%}  {note}", file=self._out, flush=True)

    def say(self, text: str) -> None:
        """A line of its own above the bar."""
        self._clear()
        print(text, file=self._out, flush=True)
        if self._out.isatty():
            self._draw()

    def end(self) -> None:
        """The last state of the bar stays."""
        self._clear()
        print(f"{self._name}  {bar(1.0)} 100%  {self.seconds:3.0f} s", file=self._out, flush=True)

    def fail(self) -> None:
        """The line that was being rewritten stays as it is."""
        if self._out.isatty():
            print(file=self._out, flush=True)

    def _draw(self) -> None:
        line = f"{self._name}  {bar(self._share)} {self._share:4.0%}  {self.seconds:3.0f} s  {self._note}"
        self._out.write(f"\r\x1b[K{line[:LINE_WIDTH]}")
        self._out.flush()

    def _clear(self) -> None:
        if self._out.isatty():
            self._out.write("\r\x1b[K")


@contextmanager
def part(out: TextIO, name: str) -> Iterator[Part]:
    """A bar from 0 to 100 %, and then the time that it took."""
    shown = Part(out, name)
    shown.update(0.0)
    try:
        yield shown
    except BaseException:
        shown.fail()
        raise
    shown.end()
