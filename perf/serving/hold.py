"""A server that several benchmarks use, since one on GPUs takes a minute to start: `python -m perf.serving.hold FILE`.

Its options are those of perf.serving.measure and rollout that say how a server is started. FILE appears when it is
ready, and is what their --at wants. It is ended by SIGTERM or SIGINT, and FILE goes.
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
    """ValueError where FILE could not appear: a server on GPUs takes a minute to start for nothing."""
    if os.path.lexists(file):
        raise ValueError(f"file: {file} is there already: another server is held by it, or one that was killed was")
    if not file.parent.is_dir():
        raise ValueError(f"file: there is no folder {file.parent}")


def publish(held: deployment.Held, file: Path) -> None:
    """All of it at once; FileExistsError if another has come first."""
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        part.write_bytes(msgspec.json.encode(held))
        os.link(part, file)
    finally:
        part.unlink(missing_ok=True)


def withdraw(held: deployment.Held, file: Path) -> None:
    """Removes what `publish` has put there, if it came to that, and no other server's."""
    if file.exists() and file.read_bytes() == msgspec.json.encode(held):
        file.unlink()


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    check(options.file)
    flags = deployment.flags(options)
    # Before the server starts, so that one which is on its way ends as well.
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
