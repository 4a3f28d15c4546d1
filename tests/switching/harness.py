"""A served model whose ranks are threads, driven step by step, with its ranks at hand; and what it must say.

What a request is told depends on the request alone, so one run that never switches (one rank, a cache that holds it
all) tells what every other run has to say: the same tokens, and in float64 the same log-probabilities.

Clocks are counted, not read: the same test does the same every time.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from splash_trt import llm as llm_module
from splash_trt import orchestrator as orchestrator_module
from splash_trt.config import EngineConfig, Layout
from splash_trt.dist.world import World
from splash_trt.layout.spec import Residency
from splash_trt.layout.switch import Record, State
from splash_trt.llm import LLM
from splash_trt.memory.map import memory_map
from splash_trt.models.families import load_config
from splash_trt.orchestrator import Orchestrator
from splash_trt.plan import Plan
from splash_trt.request import FinishReason, Request, SamplingParams, TokenDelta
from splash_trt.runtime import device_clock
from splash_trt.runtime.device_runner import DeviceRunner
from splash_trt.scheduler.scheduler import Scheduler
from splash_trt.worker import Worker, start_worker

LAYOUTS = tuple(Layout)
PAIRS = tuple(itertools.permutations(LAYOUTS, 2))
TOUR = tuple(Layout.parse(name) for name in "tp dp tp cp tp dop dp cp dp dop cp dop tp".split())
"""Goes from each layout to each other one once, and ends where it began."""
VOCAB = 256
BOUND = 1e-9
SEED = 1
SETTINGS: dict[str, Any] = {
    "dtype": "float64",
    "layouts": LAYOUTS,
    "page_tokens": 8,
    "max_batch_tokens": 48,
    "max_running": 12,
    "context_block_tokens": 24,
    "switch_hold_s": 0.5,  # of the counted clock: 50 steps
}
STEP_S = 0.01  # what the counted clocks advance by

MODEL: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def write_model(folder: Path, **changes: Any) -> Path:
    """A folder with MODEL's config.json; the weights are random. 5 heads divide by no number of ranks but 1."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | changes))
    return folder


# What is asked, and what has been told

SAMPLERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.05},
)
LENGTHS = (1, 7, 8, 9, 33, 3, 60, 17, 16, 25)
OUTPUTS = (20, 9, 28, 1, 24, 17, 12, 14)


def make_requests(count: int, max_tokens: int | None = None) -> list[Request]:
    """Greedy and sampled ones, prompts of one token, one page, one more, several blocks; nothing ends them early."""
    generator = torch.Generator().manual_seed(SEED)
    requests = []
    for i in range(count):
        length = LENGTHS[i % len(LENGTHS)]
        sampling = SamplingParams(
            max_tokens=max_tokens or OUTPUTS[i % len(OUTPUTS)],
            ignore_eos=True,
            logprobs=0,
            seed=i,
            **SAMPLERS[i % len(SAMPLERS)],
        )
        prompt = tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())
        requests.append(Request(id=f"r{i:03d}", prompt=prompt, sampling=sampling))
    return requests


@dataclasses.dataclass
class Told:
    """What one request has been told so far."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    finish: FinishReason | None = None

    def take(self, delta: TokenDelta) -> None:
        assert self.finish is None, f"{delta.request_id} was told something after its end"
        self.tokens += delta.tokens
        self.logprobs += [entry.logprob for entry in delta.logprobs]
        self.finish = delta.finish


def assert_same(got: Mapping[str, Told], want: Mapping[str, Told], *, so_far: bool = False) -> None:
    """Every request of `got` was told what `want` says; one that was cancelled, the beginning of it. so_far: as one
    that has no end yet."""
    for request_id, mine in got.items():
        theirs = want[request_id]
        assert so_far or mine.finish is not None, f"{request_id} has no end"
        count = len(mine.tokens)
        assert mine.tokens == theirs.tokens[:count], request_id
        assert len(mine.logprobs) == len(theirs.logprobs[:count]), request_id
        worst = max((abs(a - b) for a, b in zip(mine.logprobs, theirs.logprobs, strict=False)), default=0.0)
        assert worst < BOUND, (request_id, worst)
        if mine.finish not in (None, FinishReason.CANCELLED):
            assert (mine.finish, count) == (theirs.finish, len(theirs.tokens)), request_id


def noticed(got: Mapping[str, Told], want: Mapping[str, Told]) -> bool:
    """Whether what requests have been told so far is enough to tell that something is wrong."""
    try:
        assert_same(got, want, so_far=True)
    except AssertionError:
        return True
    return False


# The served model


def memory_for(folder: Path, pages: int, **config: Any) -> int:
    """The least memory_bytes that leaves every rank `pages` pages beside the heads of all ranks."""
    model = load_config(folder)
    sized = EngineConfig(memory_bytes=1, **config)
    maps = [memory_map(model, sized, rank) for rank in range(sized.num_ranks)]
    return max(m.pages_offset + m.others_bytes + pages * m.page_bytes for m in maps) + 255


class Server:
    """Ranks are threads. `told` has what came back, `plans` all plans sent, `workers` every rank's worker.

    pages: on the fullest rank, beside all heads; layouts that hold only their own heads have more.
    """

    def __init__(self, folder: Path, *, ranks: int, layout: Layout, pages: int, **config: Any) -> None:
        sizes = {"num_ranks": ranks, "layout": layout, **SETTINGS, **config}
        memory = memory_for(folder, pages, **sizes)
        self.told: dict[str, Told] = {}
        self.plans: list[Plan] = []
        self.workers: dict[int, Worker] = {}
        self._patches = ExitStack()
        for module in (orchestrator_module, device_clock):
            self._patches.enter_context(patch.object(module, "time", _counted()))
        with patch.object(llm_module, "start_worker", self._start_worker):
            del sizes["num_ranks"], sizes["layout"]
            # On a CPU wherever it runs: what GPUs are held against, too.
            self.llm = LLM(
                folder,
                ranks=ranks,
                layout=layout.name,
                run_on="cpu",
                dummy_weights=SEED,
                memory_bytes=memory,
                **sizes,
            )
            assert self.llm.orchestrator is not None
            self.orchestrator: Orchestrator = self.llm.orchestrator
        schedule = self.scheduler.schedule

        def recorded(now: float = 0.0) -> Plan | None:
            plan = schedule(now)
            if plan is not None:
                self.plans.append(plan)
            return plan

        self._patches.enter_context(patch.object(self.scheduler, "schedule", recorded))

    def _start_worker(self, world: World, *rest: Any) -> Worker:
        worker = start_worker(world, *rest)
        self.workers[world.rank] = worker
        return worker

    @property
    def scheduler(self) -> Scheduler:
        return self.orchestrator.scheduler

    @property
    def state(self) -> State:
        return self.scheduler.switcher.state

    @property
    def records(self) -> list[Record]:
        return list(self.scheduler.switcher.records)

    def runner(self, rank: int) -> DeviceRunner:
        return self.workers[rank].runner

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.orchestrator.add(request)
            self.told[request.id] = Told()

    def cancel(self, request_id: str) -> None:
        self._take(self.orchestrator.cancel(request_id))

    def step(self) -> None:
        self._take(self.orchestrator.step())
        self.scheduler.directory.check()

    def run(self, max_steps: int = 4000) -> int:
        """Step until idle; how many steps. Everything must have been given back then."""
        for count in range(max_steps):
            if self.orchestrator.idle:
                self.scheduler.check_idle()
                return count
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps: {self.state.value}, {self.records[-1:]}")

    def until(self, *states: State, max_steps: int = 500) -> None:
        """Step until the switch is in one of `states`."""
        for _ in range(max_steps):
            if self.state in states:
                return
            self.step()
        raise AssertionError(f"still {self.state.value} after {max_steps} steps: {self.records[-1:]}")

    def switch(self, layout: Layout, max_steps: int = 500) -> Record:
        """Switch and step until steady; the record of what was asked for (of the last hop)."""
        self.scheduler.switch(layout, "test")
        for _ in range(max_steps):
            self.step()
            if not self.scheduler.switcher.busy:
                return self.records[-1]
        raise AssertionError(f"still {self.state.value} after {max_steps} steps: {self.records[-1:]}")

    @property
    def num_preempted(self) -> int:
        """Admissions beyond the first one of each request."""
        seeds = [int(seed) for plan in self.plans for seed in plan.sampling["seed"]]
        return len(seeds) - len(set(seeds))

    def _take(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            self.told[delta.request_id].take(delta)

    def leave(self) -> None:
        """After a failure, which has ended the ranks."""
        self._patches.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
        if error is None:
            self.llm.close()


def _counted() -> SimpleNamespace:
    """A `time` module whose clock goes on by STEP_S at every look."""
    ticks: Iterator[int] = itertools.count()
    return SimpleNamespace(monotonic=lambda: next(ticks) * STEP_S)


WIDE: dict[str, Any] = {"max_running": 40, "max_batch_tokens": 512}
"""For a cache that fills within a few steps."""


def pages_of(server: Server, residency: Residency) -> np.ndarray:
    """[N] int64: pages that ranks hold under a residency."""
    return np.array(server.scheduler.switcher._sizes.pages[residency])


def held(server: Server) -> np.ndarray:
    """[N] int64: pages that requests hold."""
    return server.scheduler.directory.live_pages()


def scatter(server: Server, requests: Sequence[Request], seed: int) -> None:
    """Under TP: fill the cache with the longer ones of `requests`, then cancel at random until 60 % of it is live."""
    rng = random.Random(seed)
    server.add(*(request for request in requests if len(request.prompt) >= 16))
    pages = pages_of(server, Residency.SHARD).min()
    while (held(server) < 0.87 * pages).any():
        assert not server.orchestrator.idle, "these requests do not fill the cache"
        server.step()
    living = list(server.scheduler.directory)
    waiting = [key for key, told in server.told.items() if told.finish is None and key not in living]
    for request_id in waiting:
        server.cancel(request_id)
    rng.shuffle(living)
    while (held(server) > 0.6 * pages).any():
        server.cancel(living.pop())


def never_switched(folder: Path, requests: Sequence[Request]) -> dict[str, Told]:
    """What the requests are told by one rank, a cache that holds them all, and no switch."""
    with Server(folder, ranks=1, layout=Layout.TP, pages=12 * len(requests), layouts=()) as server:
        server.add(*requests)
        server.run()
        assert server.num_preempted == 0
    return server.told
