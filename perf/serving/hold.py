"""A server that several benchmarks use, since one on GPUs takes a minute to start: `python -m perf.serving.hold FILE`.

Its options are those of perf.serving.measure and rollout that say how a server is started. FILE appears when it is
ready, and is what their --at wants. It is ended by SIGTERM or SIGINT, and FILE goes.
"""

from __future__ import annotations

import argparse
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


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    flags = deployment.flags(options)
    # Before the server starts, so that one which is on its way ends as well.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with Started(flags) as server:
        part = options.file.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(deployment.Held(port=server.port, flags=flags)))
        try:
            part.rename(options.file)
            server.wait_until_ended()
        finally:
            options.file.unlink(missing_ok=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
