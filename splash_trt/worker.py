"""What every rank does: execute plans, in the order in which rank 0 made them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from splash_trt import plan as plans
from splash_trt.config import EngineConfig
from splash_trt.dist.control import Kind
from splash_trt.dist.world import World
from splash_trt.models.config import ModelConfig
from splash_trt.plan import Plan, StepResult
from splash_trt.runtime.device_runner import DeviceRunner
from splash_trt.runtime.make_runner import make_runner
from splash_trt.weights.source import WeightSource


class Worker:
    """One rank. Rank 0 calls `send` (the orchestrator does); the others call `follow`."""

    def __init__(self, world: World, runner: DeviceRunner) -> None:
        self.world = world
        self.runner = runner

    def send(self, plan: Plan) -> Callable[[], StepResult]:
        """Rank 0: send a plan to all ranks and launch its own part. Returns a function that waits for the result."""
        self.world.control.send(Kind.PLAN, plans.encode(plan))
        if self.world.device.type != "cpu":
            # This rank's GPU is about to wait for the other ranks' GPUs, and this host now and then for its GPU. A long
            # message travels only while this host looks after it, so the others must have taken the plan before.
            self.world.control.settle()
        wait = self._launch(plan)

        def result() -> StepResult:
            self.world.watch.begin_step(plan.step)
            found = wait()
            self.world.watch.end_step()
            return found

        return result

    def follow(self) -> object:
        """Other ranks: execute plans until rank 0 sends a value, which is returned, or ends the run: None."""
        while True:
            message = self.world.control.receive()
            if message.kind is Kind.STOP:
                return None
            if message.kind is Kind.OBJECT:
                return message.value
            self._launch(plans.decode(message.payload))

    def _launch(self, plan: Plan) -> Callable[[], StepResult]:
        self.world.watch.begin_step(plan.step)
        wait = self.runner.launch(plan)
        self.world.watch.end_step()
        return wait


def start_worker(
    world: World, model: ModelConfig, config: EngineConfig, source: WeightSource, tokenizer: Path | None = None
) -> Worker:
    """Load this rank's part of the model. All ranks come up or all raise, naming the one that could not.

    tokenizer: a folder with tokenizer.json, which requests with a grammar need.
    """
    try:
        runner = make_runner(world, model, config, source, tokenizer)
    except Exception as error:
        world.control.agree(f"{type(error).__name__}: {error}")
        raise
    world.control.agree(None)
    world.watch.end_step()
    return Worker(world, runner)
