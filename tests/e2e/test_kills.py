"""Whatever process of a run is killed, all end within seconds, with the cause on stderr, and nothing stays behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from splash_engines.build import build_engine
from splash_engines.manifest import file_paths, read_manifest
from splash_trt.frontends import BEAT_S
from tests.e2e.servers import MODEL, MODES, Server, StreamReader, command, free_port, run_to_end, wait_until

pytestmark = pytest.mark.mpi

END_S = 10.0
STEP_DEADLINE_S = 4.0
Start = Callable[..., Server]


@pytest.fixture
def start(engine: Path) -> Iterator[Start]:
    """Starts a server and its streams; ends what the test leaves."""
    servers = []

    def start(mode: str, *flags: str) -> Server:
        server = Server(mode, 2, ["--engine", str(engine), "--dtype", "float32", "--memory", "256M", *flags])
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


def stream(server: Server, num: int = 3) -> list[StreamReader]:
    """Streams that have begun and have far to go."""
    readers = [StreamReader(server, {"prompt": [5, 6, 7 + i], "max_tokens": 3000}) for i in range(num)]
    wait_until(lambda: all(reader.tokens for reader in readers), 60, "the first tokens")
    server.look()
    return readers


def wait_for_end(server: Server, seconds: float = END_S) -> float:
    """Seconds until every process of the run was gone; asserts that nothing of it is left."""
    began = time.monotonic()
    wait_until(lambda: not server.alive(), seconds, f"all gone\n{server.log}")
    took = time.monotonic() - began
    assert not server.leftovers(), server.log
    return took


def told(readers: list[StreamReader]) -> list[str]:
    """The error code that each stream ended with."""
    for reader in readers:
        reader.join(10)
    assert not any(reader.done or reader.is_alive() for reader in readers)
    return [reader.error["code"] if reader.error else "nothing" for reader in readers]


# What is on stderr. Nothing can be if mpirun is killed that a user started: ranks write through it.
CAUSES = {
    ("mpirun", "rank0"): r"rank 1: step \d+: ended by SIGTERM in .*; rank 0's process is gone \(step \d+",
    ("mpirun", "rank1"): r"rank 0: step \d+: ended by SIGTERM in .*; rank 1's process is gone \(step \d+",
    ("mpirun", "frontend"): r"rank 0: the frontend was ended by SIGKILL",
    ("mpirun", "mpirun"): r"",
    ("supervised", "rank0"): r"rank 1: step \d+: ended by SIGTERM in .*; rank 0's process is gone \(step \d+",
    ("supervised", "rank1"): r"rank 0: step \d+: ended by SIGTERM in .*; rank 1's process is gone \(step \d+",
    ("supervised", "supervisor"): r"rank 0: its supervisor is gone",
    ("supervised", "mpirun"): r"splash-trt: mpirun was ended by SIGKILL",
}
IN_CI = {("mpirun", "rank1"), ("supervised", "supervisor")}


@pytest.mark.parametrize(
    ("mode", "kind"), [pytest.param(*case, marks=() if case in IN_CI else pytest.mark.nightly) for case in CAUSES]
)
def test_kill(start: Start, mode: str, kind: str) -> None:
    server = start(mode).wait_until_ready()
    readers = stream(server)
    server.find(kind).kill()
    print(f"{mode}, {kind} killed: all gone after {wait_for_end(server):.1f} s")
    assert server.process.wait() == {
        ("mpirun", "rank0"): 137,
        ("mpirun", "rank1"): 137,
        ("mpirun", "frontend"): 72,
        ("supervised", "rank0"): 137,
        ("supervised", "rank1"): 137,
        ("supervised", "mpirun"): 1,
    }.get((mode, kind), -signal.SIGKILL)
    assert re.search(CAUSES[mode, kind], server.log), server.log
    assert "Traceback" not in server.log, server.log
    assert told(readers) == ["nothing" if kind == "frontend" else "engine_ended"] * 3, server.log


@pytest.mark.nightly
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_the_run_by_the_deadline(start: Start, mode: str, rank: int) -> None:
    server = start(mode, "--step-deadline", str(STEP_DEADLINE_S)).wait_until_ready()
    readers = stream(server)
    server.find(f"rank{rank}").suspend()
    wait_for_end(server, STEP_DEADLINE_S + END_S)
    assert server.process.wait() == 70
    # The other rank was in an exchange with it, or waited for its next plan.
    behind = rf"no progress for [\d.]+ s in .*; rank {rank} is behind \(step \d+"
    silent = rf"in idle; rank {rank} has given no sign of life for [\d.]+ s \(step \d+"
    place = rf"rank {1 - rank}: step \d+: ({behind}|{silent})"
    assert re.search(place, server.log), server.log
    assert told(readers) == ["engine_ended"] * 3


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_ranks_of_our_own_in_order(start: Start, number: signal.Signals) -> None:
    server = start("supervised").wait_until_ready()
    short = StreamReader(server, {"prompt": [5, 6, 7], "max_tokens": 12})
    readers = stream(server)
    os.killpg(server.process.pid, number)  # as a terminal does
    wait_for_end(server, 10 + 2 * END_S)  # streams have 10 s to finish in
    assert server.process.wait() == 0
    short.join(5)
    assert short.done and len(short.tokens) == 12
    assert told(readers) == ["shutting_down"] * 3
    assert "Traceback" not in server.log, server.log


@pytest.mark.nightly
def test_a_second_signal_does_not_wait_for_streams(start: Start) -> None:
    server = start("supervised").wait_until_ready()
    readers = stream(server)
    for _ in range(2):
        server.process.terminate()
        time.sleep(1)
    wait_for_end(server, 9)
    assert server.process.wait() == 0
    assert told(readers) == ["shutting_down"] * 3
    assert "Traceback" not in server.log, server.log


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_mpirun_ends_its_ranks_and_tells_the_streams(start: Start, number: signal.Signals) -> None:
    server = start("mpirun").wait_until_ready()
    readers = stream(server)
    os.killpg(server.process.pid, number)
    wait_for_end(server)
    assert server.process.wait() == 1  # Open MPI's own for both signals
    assert told(readers) == ["engine_ended"] * 3
    assert "Traceback" not in server.log, server.log


@pytest.mark.nightly
def test_a_signal_to_the_frontend_that_rank_0_started_ends_the_run_in_order(start: Start) -> None:
    server = start("mpirun").wait_until_ready()
    server.find("frontend").send_signal(signal.SIGTERM)
    wait_for_end(server)
    assert server.process.wait() == 0, server.log
    assert "Traceback" not in server.log, server.log


@pytest.mark.nightly
@pytest.mark.parametrize("mode", MODES)
def test_a_signal_while_ranks_start(start: Start, mode: str) -> None:
    server = start(mode)
    wait_until(lambda: "is open; waiting for the engine" in server.log, 120, "the frontend")
    server.look()
    os.killpg(server.process.pid, signal.SIGINT)
    wait_for_end(server)
    assert server.process.wait() == (0 if mode == "supervised" else 1), server.log
    assert "Traceback" not in server.log, server.log


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An engine of which one byte differs, in the last expert, that only the last rank reads; and the file it is in."""
    folder = tmp_path_factory.mktemp("damaged") / "engine"
    build_engine(Path(shutil.copytree(MODEL, folder.parent / "model")), folder)
    manifest = read_manifest(folder)
    part = next(tensor for tensor in manifest.tensors if ".experts." in tensor.name).parts[-1]
    path = file_paths(folder, manifest)[part.file]
    data = bytearray(path.read_bytes())
    data[part.offset] ^= 1
    path.write_bytes(data)
    return folder, path


@pytest.mark.parametrize("mode", ["supervised", pytest.param("mpirun", marks=pytest.mark.nightly)])
def test_a_rank_that_cannot_load(damaged: tuple[Path, Path], tmp_path: Path, mode: str) -> None:
    engine, path = damaged
    flags = ["--engine", str(engine), "--port", str(free_port()), "--memory", "256M"]
    code, stderr = run_to_end(command(mode, 2, flags), tmp_path)
    assert code == 1, stderr
    words = rf"rank \d: before the first step: start-up failed on rank 1: ValueError: {path}: was changed, damaged"
    assert re.search(words, stderr), stderr
    assert "Traceback" not in stderr, stderr
    # The frontend that rank 0 started outlives it for a moment.
    wait_until(lambda: not list(tmp_path.iterdir()), 5, "no file left")


OPTION_ERRORS = {
    "memory": (["--memory", "1K"], "--memory: 1024 is too small"),
    "memory-of-host": (["--memory", "10T", "--run-on", "cpu"], "--memory: this machine has "),
    "layout": (["--layout", "xp"], "'--layout': 'xp' is not one of"),
    "engine": (["--engine", "/nowhere"], "/nowhere: is not a folder"),
    "ranks": (["--ranks", "3"], "--ranks: 3 asked for, but mpirun starts 2"),
}


def check_refused(mode: str, engine: Path, folder: Path, flags: list[str], message: str) -> None:
    """One line says it, once, and no rank has begun."""
    code, stderr = run_to_end(command(mode, 2, ["--engine", str(engine), *flags]), folder)
    assert code == 2, stderr
    lines = [line for line in stderr.splitlines() if line.startswith("splash-trt: ")]
    assert len(lines) == 1 and message in lines[0], stderr
    assert "rank" not in stderr.replace(lines[0], "") or mode == "mpirun", stderr
    assert "Traceback" not in stderr and "frontend" not in stderr, stderr
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", [name for name in OPTION_ERRORS if name != "ranks"])
def test_a_wrong_option(engine: Path, tmp_path: Path, name: str) -> None:
    check_refused("supervised", engine, tmp_path, *OPTION_ERRORS[name])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "ranks" else pytest.mark.nightly) for name in OPTION_ERRORS]
)
def test_a_wrong_option_under_mpirun(engine: Path, tmp_path: Path, name: str) -> None:
    check_refused("mpirun", engine, tmp_path, *OPTION_ERRORS[name])


@pytest.mark.parametrize("mode", ["supervised", pytest.param("mpirun", marks=pytest.mark.nightly)])
def test_a_port_in_use(engine: Path, tmp_path: Path, mode: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        check_refused(mode, engine, tmp_path, ["--port", port], f"--port: cannot listen on 127.0.0.1:{port}")


def test_an_engine_without_a_usable_tokenizer(engine: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(engine, tmp_path / "engine")
    (copy / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "t").mkdir()
    check_refused("supervised", copy, tmp_path / "t", [], "tokenizer.json: ")


@pytest.mark.nightly
def test_a_killed_frontend_of_a_supervised_run_is_started_again(start: Start) -> None:
    server = start("supervised", "--frontends", "2").wait_until_ready()
    wait_until(lambda: all(server.ask("GET", "/readyz").status == 200 for _ in range(20)), 20, "both ready")
    readers = stream(server, 8)
    server.find("frontend").kill()
    wait_until(lambda: "frontend 0 is started again" in server.log, 20, "another frontend")
    # Which stream went where is the kernel's choice. Those of the other one go on.
    going = {reader: len(reader.tokens) for reader in readers if reader.is_alive()}
    wait_until(lambda: all(len(reader.tokens) > count for reader, count in going.items()), 60, "more tokens")
    assert not any(reader.error for reader in readers)
    server.wait_until_ready()
    assert server.ask("POST", "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4}).status == 200
    server.process.terminate()
    wait_for_end(server, 2 * END_S)
    assert server.process.wait() == 0, server.log


@pytest.mark.nightly
def test_a_frontend_that_stands_ends_a_run_under_mpirun(start: Start) -> None:
    server = start("mpirun", "--frontends", "2").wait_until_ready()
    # One alone is ready too. The other has 120 s until it gives its first sign of life, which is asked for each 2 s.
    wait_until(lambda: server.log.count("listening on") == 2, 20, "both ready")
    time.sleep(2 * BEAT_S)
    server.find("frontend").suspend()
    wait_for_end(server, 3 * END_S)
    assert server.process.wait() == 72
    silent = r"frontend 0 has given no sign of life for 10 s; it is killed\s+rank 0: frontend 0 was ended by SIGKILL"
    assert re.search(silent, server.log), server.log
