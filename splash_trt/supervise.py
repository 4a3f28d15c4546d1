"""`splash-trt serve --ranks N` without mpirun: this process starts the frontends and mpirun for the ranks.

A frontend that dies is started again; its requests are lost, those of the others go on. A rank's death ends the run:
this process notices that mpirun has ended. If this process dies, ranks and frontends notice by their lifelines.
Exit codes: 0 after SIGINT or SIGTERM; 2 for what a user got wrong; otherwise mpirun's own (that of the rank that died
first), or 1.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
import zmq

from splash_trt import environment, link
from splash_trt.dist.place import choose
from splash_trt.dist.watchdog import last_words
from splash_trt.frontend.main import EXIT_FAILED
from splash_trt.frontends import Frontends, how_it_ended
from splash_trt.launch import end_mpirun, mpirun_command
from splash_trt.lifeline import Lifeline
from splash_trt.observe import log as logs
from splash_trt.serve import FOLDER_PREFIX, ServeOptions, frontend_options

POLL_S = 0.1
RANKS_END_S = 8.0
MPIRUN_END_S = 2.0
LAST_WORDS_S = 3.0  # in which frontends notice that the engine is gone, and tell their clients
LINGER_MS = 1000


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is told at its start, as JSON on its command line."""

    options: ServeOptions
    link_address: str
    lifeline_path: str


def supervise(options: ServeOptions) -> int:
    """Serve until a signal, or a failure, ends the run; returns the exit code."""
    logs.configure("supervisor", level=options.log_level, form=options.log_format)
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True) as folder:
        lifeline_path, link_path = Path(folder) / "lifeline", Path(folder) / "link"
        address, failed = f"ipc://{link_path}", threading.Event()

        def say(code: int, why: str) -> None:
            last_words(f"splash-trt: {why}")
            failed.set()

        settings = RankSettings(options=options, link_address=address, lifeline_path=str(lifeline_path))
        program = [sys.executable, "-m", "splash_trt", "serve-rank", msgspec.json.encode(settings).decode()]
        on_gpus = choose(options.run_on, options.ranks) == "gpu"
        command = mpirun_command(options.ranks, program, on_gpus=on_gpus)
        lifeline = Lifeline(lifeline_path)
        http = frontend_options(options, address)
        frontends = Frontends(http, options.http.frontends, Path(folder), restarts=True, failed=say)
        # In a session of its own, so that Ctrl-C reaches this process only, which lets the ranks finish in order.
        ranks = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=environment.for_mpirun(),
            start_new_session=True,
        )
        patience_s = 0.0
        try:
            code = _serve(frontends, ranks, failed)
            # Ranks that are still loading do not listen, so there is nothing to wait for. If one has died, mpirun is
            # about to report that and to end.
            patience_s = MPIRUN_END_S if code != 0 else RANKS_END_S if link_path.exists() else 0.0
            if code == 0 and link_path.exists():
                _end_engine(address)
        finally:
            # From here on a signal cuts the wait short; files are removed all the same.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.default_int_handler)
            try:
                end_mpirun(ranks, patience_s)
            finally:
                frontends.close()
                lifeline.close()
        if code == EXIT_FAILED and ranks.returncode:
            last_words(f"splash-trt: mpirun {how_it_ended(ranks.returncode)}")
            return ranks.returncode if ranks.returncode > 0 else EXIT_FAILED
        return code


def _serve(frontends: Frontends, ranks: subprocess.Popen[bytes], failed: threading.Event) -> int:
    """Waits until a signal has ended the frontends, one of them cannot be kept up, or mpirun ends. Returns the exit
    code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: frontends.end(number))
    while frontends.code is None and not failed.is_set() and ranks.poll() is None:
        failed.wait(POLL_S)
    if frontends.code is not None:
        return frontends.code
    frontends.await_end(LAST_WORDS_S)
    return EXIT_FAILED


def _end_engine(address: str) -> None:
    """Tell rank 0 to end."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.connect(address)
    socket.send(link.encode(link.Shutdown(drain=False)))
    socket.close()
    context.term()
