"""A rank's model for the step benchmarks, and the blocks of steps that rank 0 runs under any layout.

Plans come from the real scheduler and go through the real orchestrator, worker and runner. All four layouts share one
runner, with the weights of FULL residency: a plan names its layout, and layouts run one after another, each with an
empty cache. SHARD layouts then have fewer pages than they could have, which does not change a step's time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

from splash_trt.config import EngineConfig, Layout
from splash_trt.dist.world import World
from splash_trt.layout.spec import SPECS, Residency
from splash_trt.memory.map import Capacity, capacity, memory_map, model_sizes
from splash_trt.models.config import ModelConfig
from splash_trt.models.families import load_config
from splash_trt.orchestrator import Orchestrator
from splash_trt.plan import Plan, StepResult
from splash_trt.request import Request, SamplingParams
from splash_trt.scheduler.scheduler import Scheduler
from splash_trt.weights.dummy import DummyWeights
from splash_trt.worker import start_worker

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SEED = 1
PAGE_TOKENS = 64


def bench_config(
    model: ModelConfig,
    *,
    num_ranks: int,
    dtype: str,
    cache_tokens: int,
    max_running: int = 64,
    max_batch_tokens: int = 2048,
    page_tokens: int = PAGE_TOKENS,
    run_on: str = "cpu",
    simulate_routing: str = "",
    experts_cut: str = "whole",
) -> EngineConfig:
    """A config with cache for cache_tokens in every layout: every rank's arena is as large as the largest that a rank
    needs."""
    config = EngineConfig(
        num_ranks=num_ranks,
        run_on=run_on,
        capture_ahead=False,  # there are few cells, and each runs once before it is timed
        layout=Layout.DP,
        layouts=tuple(Layout),
        simulate_routing=simulate_routing,
        experts_cut=experts_cut,
        dtype=dtype,
        page_tokens=page_tokens,
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        step_deadline_s=300.0,
    )
    maps = [memory_map(model, config, rank) for rank in range(num_ranks)]
    # In addition: decoded tokens, and each request's last page.
    pages = -(-cache_tokens // page_tokens) + 3 * max_running
    need = max(m.workspace_bytes + m.own_bytes + m.others_bytes + pages * m.page_bytes for m in maps)
    return dataclasses.replace(config, memory_bytes=need + 4096)


def model_folder(name: str) -> Path:
    """A folder of perf/configs by its name, or any folder with a config.json by its path."""
    return CONFIGS / name if (CONFIGS / name).is_dir() else Path(name)


class Bench:
    """A model with random weights on this rank. Rank 0 runs blocks of steps while the other ranks `follow`."""

    def __init__(self, world: World, folder: Path, config: EngineConfig) -> None:
        self.model = load_config(folder)
        self.config = config
        self.worker = start_worker(world, self.model, config, DummyWeights(self.model, SEED))
        self._pages = capacity(self.model, config, Layout.DP).pages_per_rank
        # Contexts whose prefill is skipped consist of these numbers: finite and all different, as in real rows. The
        # last pages of the storage are not used, since the other ranks' heads lie there.
        usable = self.worker.runner.storage.pages[: self._pages[world.rank]]
        usable.normal_(generator=torch.Generator(usable.device).manual_seed(SEED))
        self._random = np.random.default_rng(SEED)
        self._count = 0
        self.idle = 0.0
        """The share of time, in the last block of decode steps, in which rank 0's device ran no step."""

    def follow(self) -> None:
        """For ranks other than 0: executes plans until rank 0 calls `release`."""
        self.worker.follow()
        self.worker.runner.close()

    def release(self) -> None:
        """For rank 0: ends the others' `follow`."""
        self.worker.world.control.send_object(None)
        self.worker.runner.close()

    def decode(self, layout: Layout, *, batch: int, context: int, steps: int, warmup: int) -> list[float]:
        """The seconds of each of `steps` decode steps of `batch` requests with contexts of about `context` tokens."""
        source = _SkippedPrefill(self.worker.send, batch, self.model.vocab_size, self._random)
        orchestrator = self._orchestrator(layout, source)
        wish = SamplingParams(max_tokens=batch + steps + warmup + 64, ignore_eos=True)
        requests = [self._request(context, wish) for _ in range(batch)]
        for request in requests:
            orchestrator.add(request)
        while not source.filled:
            orchestrator.step()
        times, busy = [], 0.0
        for step in range(warmup + steps):
            begin = time.perf_counter()
            turn = orchestrator.turn()
            if step >= warmup:
                times.append(time.perf_counter() - begin)
                busy += turn.seconds
        self.idle = 1 - busy / sum(times)
        for request in requests:
            orchestrator.cancel(request.id)
        _finish(orchestrator)
        return times

    def prefill(self, layout: Layout, tokens: int) -> list[float]:
        """The seconds from an idle engine to the first token of a prompt of `tokens` tokens, as a list of one."""
        orchestrator = self._orchestrator(layout, self.worker.send)
        orchestrator.add(self._request(tokens, SamplingParams(max_tokens=1, ignore_eos=True)))
        begin = time.perf_counter()
        while not orchestrator.idle:
            orchestrator.step()
        seconds = time.perf_counter() - begin
        _finish(orchestrator)
        return [seconds]

    def greedy(self, layout: Layout, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Each prompt's greedy continuation, with a real prefill."""
        orchestrator = self._orchestrator(layout, self.worker.send)
        wish = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        out: dict[str, list[int]] = {}
        for index, prompt in enumerate(prompts):
            orchestrator.add(Request(id=f"{index:04d}", prompt=tuple(prompt), sampling=wish))
            out[f"{index:04d}"] = []
        while not orchestrator.idle:
            for delta in orchestrator.step():
                out[delta.request_id] += delta.tokens
        _finish(orchestrator)
        return list(out.values())

    def _request(self, tokens: int, wish: SamplingParams) -> Request:
        self._count += 1
        prompt = self._random.integers(0, self.model.vocab_size, tokens).tolist()
        return Request(id=f"{self._count:08d}", prompt=tuple(prompt), sampling=wish)

    def _orchestrator(self, layout: Layout, execute: Callable[[Plan], Callable[[], StepResult]]) -> Orchestrator:
        config = dataclasses.replace(self.config, layout=layout)
        room = Capacity(
            pages_per_rank=self._pages, page_tokens=config.page_tokens, placement=SPECS[layout].placement
        ).request_tokens
        scheduler = Scheduler(
            config,
            sizes=dataclasses.replace(model_sizes(self.model, config), pages=dict.fromkeys(Residency, self._pages)),
            request_tokens=room,
            vocab_size=self.model.vocab_size,
            max_context=self.model.max_positions,
            eos_token_ids=self.model.eos_token_ids,
        )
        return Orchestrator(scheduler, execute, config.plans_in_flight)


class _SkippedPrefill:
    """Executes no plan until one has exactly one decode token of each request. Contexts are then whatever pages hold.

    The first executed plan also has the block tables and sampling parameters of the skipped ones, and random ids, so
    that rows differ and spread over experts as in reality.
    """

    def __init__(
        self,
        execute: Callable[[Plan], Callable[[], StepResult]],
        batch: int,
        vocab_size: int,
        random: np.random.Generator,
    ) -> None:
        self._execute = execute
        self._batch = batch
        self._vocab_size = vocab_size
        self._random = random
        self._skipped: list[Plan] = []
        self.filled = False

    def __call__(self, plan: Plan) -> Callable[[], StepResult]:
        if self.filled:
            return self._execute(plan)
        self._skipped.append(plan)
        if plan.num_rows != self._batch or plan.num_tokens != self._batch or not (plan.start > 0).all():
            made_up = self._made_up(plan)
            return lambda: made_up
        self.filled = True
        return self._execute(
            msgspec.structs.replace(
                plan,
                tables=np.concatenate([p.tables for p in self._skipped]),
                sampling=np.concatenate([p.sampling for p in self._skipped]),
                token=self._ids(self._batch),
            )
        )

    def _ids(self, count: int) -> np.ndarray:
        return self._random.integers(0, self._vocab_size, count)

    def _made_up(self, plan: Plan) -> StepResult:
        wanted = len(plan.want_index)
        none = np.zeros((wanted, 0))
        return StepResult(
            step=plan.step,
            token=self._ids(wanted),
            logprob=np.full(wanted, np.nan),
            top_token=none.astype(np.int64),
            top_logprob=none,
        )


def _finish(orchestrator: Orchestrator) -> None:
    """Takes in what is still in flight: the next block needs all pages free."""
    while not orchestrator.idle:
        orchestrator.step()
    orchestrator.scheduler.check_idle()
