"""Keeps a server for several benchmarks, since one on GPUs takes a minute to start: `python -m perf.serving.hold FILE`.

Its options are those of perf.serving.measure and rollout that say how a server is started. FILE appears when the server
is ready, and is to be given to their --at. SIGTERM or SIGINT ends the server and removes FILE.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from perf.serving import deployment
from perf.serving.server import Started


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m perf.serving.hold")
    parser.add_argument("file", type=Path)
    deployment.add_server_options(parser)
    return parser.parse_args(arguments)


def check(file: Path) -> None:
    """ValueError if FILE could not be written later: a server on GPUs would have been started in vain."""
    if os.path.lexists(file):
        raise ValueError(f"file: {file} is there already: another server is held by it, or one that was killed was")
    if not file.parent.is_dir():
        raise ValueError(f"file: there is no folder {file.parent}")


def publish(held: deployment.Held, file: Path) -> None:
    """Makes FILE appear, complete. FileExistsError if another server's is there by now."""
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        part.write_bytes(msgspec.json.encode(held))
        os.link(part, file)
    finally:
        part.unlink(missing_ok=True)


def withdraw(held: deployment.Held, file: Path) -> None:
    """Removes FILE if `publish` has made it appear, but not another server's."""
    if file.exists() and file.read_bytes() == msgspec.json.encode(held):
        file.unlink()


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    check(options.file)
    flags = deployment.flags(options)
    # Set before the server starts, so that they also end a server that is still starting.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with Started(flags) as server:
        held = deployment.Held(port=server.port, flags=flags)
        try:
            publish(held, options.file)
            server.wait_until_ended()
        finally:
            withdraw(held, options.file)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
