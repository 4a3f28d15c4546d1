"""The command `splash-trt top`."""

from __future__ import annotations

from pathlib import Path

import click

from splash_trt.frontend.options import HttpSettings
from splash_trt.options import Number, or_fail


@click.command("top")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server's.")
@click.option("--api-key", metavar="KEY", help="Where the server asks for one.")
@click.option("--api-key-file", type=click.Path(path_type=Path), metavar="FILE", help="A file whose first line is it.")
@click.option("--interval", type=Number(0.1, 3600), default=1.0, show_default=True, metavar="SECONDS")
@click.option("--minutes", type=click.IntRange(1, 30), default=5, show_default=True, help="How far back it shows.")
@click.option("--once", is_flag=True, help="Print how things stand now, as text, and end.")
def top_command(
    url: str, api_key: str | None, api_key_file: Path | None, interval: float, minutes: int, once: bool
) -> None:
    """Show a server's layout, load, cache and switches; Ctrl-C ends it. /dashboard shows the same in a browser."""
    from splash_trt.top.screen import show

    file = None if api_key_file is None else str(api_key_file)
    key = or_fail(lambda: HttpSettings(api_key=api_key, api_key_file=file).key())
    or_fail(lambda: show(url, key, window_s=60 * minutes, interval_s=None if once else interval))
