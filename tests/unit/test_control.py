"""The control channel between threads, the board and what the watchdog makes of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from splash_trt.dist.board import ROW_BYTES, Board, Phase, Row, Watch
from splash_trt.dist.collectives import RankFailure
from splash_trt.dist.control import Kind, Message
from splash_trt.dist.watchdog import Watchdog, describe, suspect
from splash_trt.dist.world import ThreadWorld, World
from tests.mpi import control_cases


@pytest.mark.parametrize("size", [1, 2, 3, 4])
class TestThreadControl:
    def test_messages_arrive_in_order_on_all_ranks(self, size: int) -> None:
        for received in ThreadWorld(size).run(control_cases.send_and_receive)[1:]:
            assert received == control_cases.SENT

    def test_objects_arrive(self, size: int) -> None:
        value = {"outputs": [[1, 2, 3], []], "text": "ü", "mass": 0.5}
        got = ThreadWorld(size).run(lambda world: control_cases.broadcast(world, value))
        assert got == [value] * size

    def test_agree_when_all_are_well(self, size: int) -> None:
        world = ThreadWorld(size)
        world.run(lambda world: world.control.agree(None))
        assert {row.phase for row in world.board.read()} == {Phase.IDLE}

    def test_agree_names_the_failing_rank_everywhere(self, size: int) -> None:
        last = size - 1
        outcomes = ThreadWorld(size).outcomes(
            lambda world: world.control.agree("ValueError: planted" if world.rank == last else None)
        )
        for outcome in outcomes:
            assert isinstance(outcome.error, RankFailure) and outcome.error.rank == last
            assert f"start-up failed on rank {last}: ValueError: planted" in str(outcome.error)


class TestThreadControlFailures:
    def test_agree_does_not_wait_for_ranks_that_still_load(self) -> None:
        def program(world: World) -> None:
            if world.rank == 2:
                world.collectives.all_reduce(torch.ones(1))  # never comes about
            world.control.agree("OSError: no such file" if world.rank == 0 else None)

        for outcome in ThreadWorld(3, deadline_s=30).outcomes(program):
            assert isinstance(outcome.error, RankFailure) and outcome.error.rank == 0
            assert "OSError: no such file" in str(outcome.error)

    def test_a_rank_that_takes_no_messages_is_named(self) -> None:
        def program(world: World) -> None:
            if world.rank == 0:
                for _ in range(20):
                    world.control.send(Kind.PLAN, b"x")
            elif world.rank == 1:
                time.sleep(1.0)
            else:
                while True:
                    world.control.receive()

        outcomes = ThreadWorld(3, deadline_s=0.2).outcomes(program)
        error = outcomes[0].error
        assert isinstance(error, RankFailure) and error.rank == 1 and "send" in str(error)

    def test_an_idle_wait_has_no_deadline(self) -> None:
        def program(world: World) -> Message | None:
            world.collectives.all_reduce(torch.ones(1))
            if world.rank == 1:
                return world.control.receive()
            time.sleep(0.5)
            world.control.send(Kind.STOP)
            return None

        assert ThreadWorld(2, deadline_s=0.1).run(program)[1] == Message(Kind.STOP, b"")

    @pytest.mark.parametrize("fails", [False, True])
    def test_an_idle_wait_ends_when_rank_0_is_gone(self, fails: bool) -> None:
        def program(world: World) -> None:
            if world.rank == 0:
                if fails:
                    raise KeyError("planted")
                return
            world.control.receive()

        outcomes = ThreadWorld(3, deadline_s=30).outcomes(program)
        for rank in (1, 2):
            error = outcomes[rank].error
            assert isinstance(error, RankFailure) and error.rank == 0

    def test_the_calling_thread_can_be_rank_0(self) -> None:
        seen: list[list[object]] = [[], []]

        def follow(world: World) -> None:
            while (message := world.control.receive()).kind is not Kind.STOP:
                seen[world.rank - 1].append(message.value)
                world.collectives.all_reduce(torch.ones(1))

        threads = ThreadWorld(3)
        world = threads.start(follow)
        for value in range(4):
            world.control.send_object(value)
            assert float(world.collectives.all_reduce(torch.ones(1))) == 3
        world.control.send(Kind.STOP)
        threads.join()
        assert seen == [[0, 1, 2, 3], [0, 1, 2, 3]]


class TestBoard:
    def test_a_watch_writes_its_own_row_only(self) -> None:
        board = Board(memoryview(bytearray(3 * ROW_BYTES)), [4, 5, 6])
        untouched = bytes(board.cells(4)), bytes(board.cells(6))
        watch = Watch(board, 5)
        watch.begin_step(17)
        watch.layer(3)
        watch.enter(Phase.ALL_GATHER)
        assert (bytes(board.cells(4)), bytes(board.cells(6))) == untouched
        row = board.read()[1]
        assert (row.rank, row.pid, row.step, row.counter) == (5, os.getpid(), 17, 1)
        assert row.place == "step 17, all_gather, layer 3"
        watch.leave()
        assert watch.row().phase is Phase.COMPUTING
        watch.end_step()
        assert watch.row().place == "step 17, idle"

    def test_messages_are_not_counted_as_collectives(self) -> None:
        watch = Watch(Board.local(1), 0)
        watch.enter(Phase.CONTROL)
        watch.leave()
        assert watch.row().counter == 0 and watch.row().phase is Phase.STARTING

    def test_collectives_report_to_it(self) -> None:
        threads = ThreadWorld(2)
        threads.run(lambda world: [world.collectives.all_reduce(torch.ones(1)) for _ in range(3)])
        assert [row.counter for row in threads.board.read()] == [3, 3]


SECOND = 10**9
NOW = 100 * SECOND


def row(rank: int, **values: object) -> Row:
    here = Row(rank, os.getpid(), 17, 40, Phase.ALL_REDUCE, 3, NOW - SECOND, NOW)
    return replace(here, **values)  # type: ignore[arg-type]


class TestSuspect:
    def test_the_rank_in_an_earlier_step(self) -> None:
        rows = [row(0), row(1, step=16, counter=39, phase=Phase.COMPUTING, layer=-1), row(2)]
        assert suspect(rows, 2, NOW) == "rank 1 is behind (step 16, computing)"

    def test_the_rank_with_fewer_collectives(self) -> None:
        rows = [row(0), row(1), row(2, counter=38)]
        assert suspect(rows, 0, NOW) == "rank 2 is behind (step 17, all_reduce, layer 3)"

    def test_a_rank_without_a_sign_of_life_when_all_are_equally_far(self) -> None:
        rows = [row(0), row(1, beat_ns=NOW - 8 * SECOND)]
        assert suspect(rows, 0, NOW) == ("rank 1 is behind (step 17, all_reduce, layer 3, no sign of life for 8.0 s)")

    def test_nobody(self) -> None:
        assert suspect([row(0), row(1)], 0, NOW) == "all ranks are equally far"
        assert suspect([row(0)], 0, NOW) == "there are no other ranks here"

    def test_the_rank_itself(self) -> None:
        rows = [row(0), row(1, counter=39)]
        assert suspect(rows, 1, NOW) == "this rank is behind the others (rank 0: step 17, all_reduce, layer 3)"

    def test_a_rank_that_failed_or_is_gone_comes_first(self) -> None:
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        behind = row(1, counter=3)
        assert suspect([row(0), behind, row(2, phase=Phase.FAILED)], 0, NOW) == "rank 2 failed (step 17)"
        assert suspect([row(0), behind, row(2, pid=gone.pid)], 0, NOW).startswith("rank 2's process is gone (step 17")

    def test_a_rank_before_its_first_step(self) -> None:
        assert describe(row(1, step=-1, phase=Phase.STARTING, layer=-1), NOW) == (
            "rank 1 is behind (before the first step, starting)"
        )


# A lone rank in a process of its own. What it does inside step 3 is filled in.
GUARDED = """
import time
from splash_trt.dist.board import Board, Phase, Watch
from splash_trt.dist.watchdog import Watchdog
board = Board.local(2)
watch = Watch(board, 0)
dog = Watchdog(watch, deadline_s=1, startup_deadline_s=6)
dog.start()
print("started", flush=True)
{}
dog.stop()
print("ended", flush=True)
"""


def guarded(body: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", GUARDED.format(body)], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


class TestWatchdog:
    def test_a_stuck_collective(self) -> None:
        code, out, err = guarded("watch.begin_step(3); watch.layer(2); watch.enter(Phase.ALL_TO_ALL); time.sleep(30)")
        assert code == 70 and out == "started\n"
        assert re.fullmatch(
            r"rank 0: step 3: no progress for 1\.\d s in all_to_all \(layer 2\); there are no other ranks here\n", err
        ), err

    def test_idling_starting_and_progress_are_no_reason(self) -> None:
        code, out, err = guarded(
            "time.sleep(1.4); watch.begin_step(3)\n"
            "for _ in range(4): watch.enter(Phase.ALL_REDUCE); time.sleep(0.25); watch.leave(); time.sleep(0.1)\n"
            "watch.end_step(); time.sleep(1.4)"
        )
        assert (code, out, err) == (0, "started\nended\n", "")

    def test_a_peer_without_a_sign_of_life_while_this_rank_idles(self) -> None:
        code, _, err = guarded("peer = Watch(board, 1); peer.end_step(); peer.beat(); watch.end_step(); time.sleep(30)")
        assert code == 70
        assert re.fullmatch(
            r"rank 0: before the first step: in idle; "
            r"rank 1 has given no sign of life for 1\.\d s \(before the first step, idle\)\n",
            err,
        ), err

    def test_sigterm_in_code_that_never_returns_to_python(self) -> None:
        body = (
            "import os, signal, threading; watch.begin_step(3)\n"
            "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # the main thread never handles it\n"
            "os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)"
        )
        code, _, err = guarded(body)
        assert code == 143
        assert err == "rank 0: step 3: ended by SIGTERM in computing; there are no other ranks here\n"

    def test_the_end_of_the_parent(self) -> None:
        program = GUARDED.format("watch.end_step(); time.sleep(30)")
        # The middle process waits for the guarded one to start, then leaves it alone.
        middle = (
            "import subprocess, sys\n"
            f"p = subprocess.Popen([sys.executable, '-c', {program!r}], stdout=subprocess.PIPE)\n"
            "p.stdout.readline(); print(p.pid, flush=True)"
        )
        done = subprocess.run([sys.executable, "-c", middle], capture_output=True, text=True, timeout=60)
        # stderr closes when the guarded process has ended too.
        assert "rank 0: before the first step: mpirun (pid" in done.stderr and "is gone, in idle" in done.stderr

    def test_stop_gives_sigterm_back(self) -> None:
        watch = Watch(Board.local(1), 0)
        dog = Watchdog(watch, 5, 5)
        dog.start()
        assert watch.row().beat_ns > 0
        dog.stop()
        watch.begin_step(1)
