"""`splash-trt serve --ranks N` without mpirun: this process is the frontend, and starts mpirun for the ranks.

A death anywhere ends the run: mpirun's end is noticed here, and the ranks notice this process's end by a lifeline.
Exit codes: 0 after SIGINT or SIGTERM, 2 for what a user got wrong, mpirun's own (that of the rank that died first) or 1
after anything else.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from splash_trt import environment
from splash_trt.dist.watchdog import last_words
from splash_trt.frontend.main import EXIT_FAILED, run
from splash_trt.frontend.main import Options as FrontendOptions
from splash_trt.launch import mpirun_command
from splash_trt.lifeline import Lifeline
from splash_trt.observe import log as logs
from splash_trt.serve import FOLDER_PREFIX, ServeOptions, frontend_options, how_it_ended

POLL_S = 0.1
RANKS_END_S = 8.0
MPIRUN_END_S = 2.0
TERMINATE_S = 4.0
LAST_WORDS_S = 3.0  # for the frontend to notice that the engine is gone, and to tell its clients


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is started with, as JSON on its command line."""

    options: ServeOptions
    link_address: str
    lifeline_path: str


def supervise(options: ServeOptions) -> int:
    """Serve until told to stop; returns the exit code."""
    logs.configure("frontend", level=options.log_level, form=options.log_format)
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True) as folder:
        lifeline_path, link_path = Path(folder) / "lifeline", Path(folder) / "link"
        lifeline = Lifeline(lifeline_path)
        address = f"ipc://{link_path}"
        settings = RankSettings(options=options, link_address=address, lifeline_path=str(lifeline_path))
        program = [sys.executable, "-m", "splash_trt", "serve-rank", msgspec.json.encode(settings).decode()]
        # A session of its own: Ctrl-C reaches this process only, which lets the ranks finish in order.
        ranks = subprocess.Popen(
            mpirun_command(options.ranks, program),
            stdin=subprocess.DEVNULL,
            env=environment.for_mpirun(),
            start_new_session=True,
        )
        patience_s = 0.0
        try:
            code = asyncio.run(_serve(frontend_options(options, address), ranks))
            # Ranks that still load do not listen to anybody. If one has died, mpirun is about to say so and to end.
            patience_s = MPIRUN_END_S if code != 0 else RANKS_END_S if link_path.exists() else 0.0
        finally:
            # From here on a signal cuts the wait short, and what is on disk is removed all the same.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            _end(ranks, patience_s)
            lifeline.close()
        if code == EXIT_FAILED and ranks.returncode:
            last_words(f"splash-trt: mpirun {how_it_ended(ranks.returncode)}")
            return ranks.returncode if ranks.returncode > 0 else EXIT_FAILED
        return code


async def _serve(options: FrontendOptions, ranks: subprocess.Popen[bytes]) -> int:
    """The frontend, until it ends or mpirun does; the exit code."""
    frontend = asyncio.ensure_future(run(options))
    while not frontend.done() and ranks.poll() is None:
        await asyncio.wait({frontend}, timeout=POLL_S)
    await asyncio.wait({frontend}, timeout=LAST_WORDS_S)
    if frontend.done():
        return frontend.result()
    frontend.cancel()
    return EXIT_FAILED


def _end(ranks: subprocess.Popen[bytes], patience_s: float) -> None:
    """Wait for mpirun to end by itself, then make it: told to, it ends its ranks within two seconds."""
    for stop, wait_s in ((None, patience_s), (ranks.terminate, TERMINATE_S), (ranks.kill, TERMINATE_S)):
        if stop is not None:
            stop()
        try:
            ranks.wait(wait_s)
            return
        except subprocess.TimeoutExpired:
            continue
