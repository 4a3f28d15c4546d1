"""A rank that runs steps until one rank meets with a fault; run under mpirun by test_faults.py.

    python -m tests.mpi.fault_program FAULT DEADLINE_S

The faulty rank is 1, in step 5. It prints its pid and the moment of the fault (CLOCK_MONOTONIC) to stdout. Rank 0 sends
the steps over the control channel, as a server does; the others wait there between steps.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from splash_trt.dist.control import Kind, Message
from splash_trt.dist.world import World
from splash_trt.launch import run_under_mpi

FAULTY_RANK, FAULTY_STEP = 1, 5


def fault(name: str) -> None:
    """What happens to the faulty rank."""
    print(f"pid {os.getpid()} fault at {time.monotonic()}", flush=True)
    if name == "exception":
        raise LookupError("planted")
    if name == "exit":
        sys.exit(0)
    if name == "mpirun":
        time.sleep(0.5)  # what was printed goes through mpirun
        os.kill(os.getppid(), signal.SIGKILL)
        return
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[name])


def run_steps(world: World, name: str) -> int:
    """Never ends by itself."""
    step = 0
    while True:
        if world.rank == 0:
            world.control.send(Kind.PLAN, step.to_bytes(8, "little"))
        else:
            message = world.control.receive()
            assert message == Message(Kind.PLAN, step.to_bytes(8, "little")), (message, step)
        world.watch.begin_step(step)
        for layer in range(3):
            world.watch.layer(layer)
            if (world.rank, step, layer) == (FAULTY_RANK, FAULTY_STEP, 1):
                fault(name)
            world.collectives.all_reduce(torch.ones(64))
        world.watch.end_step()
        step += 1


def main() -> None:
    """The entry point of a rank."""
    print(f"pid {os.getpid()}", flush=True)
    run_under_mpi(lambda world: run_steps(world, sys.argv[1]), deadline_s=float(sys.argv[2]), startup_deadline_s=60)


if __name__ == "__main__":
    main()
