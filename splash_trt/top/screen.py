"""Shows snapshots in a terminal, each in place of the one before, or a single one as text."""

from __future__ import annotations

import sys
import time

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from splash_trt.top.client import Client, NotReached, Refused, Snapshot
from splash_trt.top.view import Style, view

PIPED_COLUMNS = 110


def show(url: str, api_key: str | None, *, window_s: int, interval_s: float | None) -> None:
    """Show snapshots until Ctrl-C; a single one if interval_s is None or stdout is no terminal.

    window_s: how far back graphs go. Raises ValueError or OSError if the server cannot be asked.
    """
    client = Client(url, api_key)
    console = Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS, highlight=False)
    style = Style(plain=not console.encoding.lower().startswith("utf"))
    try:
        snapshot = client.snapshot(0)
    except NotReached as error:
        raise OSError(f"{error}; start one with `splash-trt serve`, or say with --url where it is") from None
    except Refused as error:
        remedy = "; give it with --api-key or --api-key-file" if error.status == 401 else ""
        raise OSError(f"the server at {url} refused: {error}{remedy}") from None
    if interval_s is None or not console.is_terminal:
        with console.capture() as captured:
            console.print(view(snapshot, style, console.width, window_s))
        print("\n".join(line.rstrip() for line in captured.get().splitlines()))
        return
    try:
        _follow(client, snapshot, console, style, window_s, interval_s)
    except KeyboardInterrupt:
        return


def _follow(
    client: Client, snapshot: Snapshot, console: Console, style: Style, window_s: int, interval_s: float
) -> None:
    trouble = None
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            shown = view(snapshot, style, console.width, window_s)
            live.update(shown if trouble is None else Group(trouble, shown), refresh=True)
            time.sleep(interval_s)
            try:
                # After trouble it may be another server, whose seconds begin at 0 again: ask for all of them.
                snapshot = client.snapshot(max(0, snapshot.timeline.next - window_s) if trouble is None else 0)
                trouble = None
            except NotReached as error:
                trouble = Text(f"not connected, retrying: {error}", style="bold red")
            except Refused as error:
                trouble = Text(f"not ready, retrying: {error}", style="bold red")
