"""A scheduler with simulated ranks whose every plan is checked against what must hold of all plans."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import SPECS, Residency
from splash_trt.layout.switch import State
from splash_trt.migration.diff import Sizes
from splash_trt.plan import LAST_SAMPLED, SAMPLE, Plan, StepResult, decode, encode
from splash_trt.request import Request, SamplingParams
from splash_trt.scheduler.admission import ExpectedOutput
from splash_trt.scheduler.scheduler import Scheduler
from splash_trt.scheduler.switcher import Switcher
from tests.oracles.simulated_ranks import VOCAB, Outputs, SimulatedRanks, Traffic

EOS = 3


def request(name: str, prompt: int | tuple[int, ...] = 4, max_tokens: int = 8, **more: Any) -> Request:
    """prompt: its ids, or how many to make up. `more`: fields of Request, the others of SamplingParams."""
    fields = {key: more.pop(key) for key in ("priority", "deadline_s") if key in more}
    more.setdefault("ignore_eos", True)
    ids = tuple((7 * i + 11 * len(name)) % VOCAB for i in range(prompt)) if isinstance(prompt, int) else prompt
    return Request(id=name, prompt=ids, sampling=SamplingParams(max_tokens=max_tokens, **more), **fields)


def new_scheduler(
    config: EngineConfig,
    sizes: Sizes,
    request_tokens: int,
    max_context: int,
    expected_output: ExpectedOutput | None = None,
) -> Scheduler:
    return Scheduler(
        config,
        sizes=sizes,
        request_tokens=request_tokens,
        vocab_size=VOCAB,
        max_context=max_context,
        eos_token_ids=(EOS,),
        expected_output=expected_output,
    )


def compact_pages(scheduler: Scheduler, rank: int, limit: int, budget_pages: int) -> int:
    """Has the next plan move up to budget_pages of a rank's pages below `limit`, as a switch does; returns how many."""
    return scheduler._ledger.compact(rank, limit, budget_pages, step=scheduler._step + 1)


def longest_request(layout: Layout, pages: tuple[int, ...]) -> int:
    """Pages of the longest single request, found by trying."""
    ranks = len(pages)
    if layout is Layout.TP:
        return min(pages)
    if layout in (Layout.DP, Layout.DOP):
        return max(pages)
    best = 0
    for home in range(ranks):
        free, count = list(pages), 0
        while free[(home + count) % ranks]:
            free[(home + count) % ranks] -= 1
            count += 1
        best = max(best, count)
    return best


class CheckedScheduler:
    """Steps as the orchestrator does. `outputs` has what came back; every plan so far is in `plans`.

    pages: of each rank while it has its own heads only; full_pages: while it has all heads (None: as many).
    """

    def __init__(
        self,
        pages: tuple[int, ...] = (64,),
        *,
        full_pages: tuple[int, ...] | None = None,
        heads: tuple[int, ...] | None = None,
        layout: Layout = Layout.TP,
        max_context: int = 1 << 20,
        plans_in_flight: int = 2,
        expected_output: ExpectedOutput | None = None,
        **config: Any,
    ) -> None:
        config = {"page_tokens": 4, "max_batch_tokens": 32, "max_running": 8, **config}
        self.config = EngineConfig(num_ranks=len(pages), layout=layout, plans_in_flight=plans_in_flight, **config)
        self.sizes = Sizes(
            page_tokens=self.config.page_tokens,
            row_bytes=64,
            itemsize=4,
            heads=heads or (1,) * len(pages),
            head_numbers=(100, 7),
            pages={Residency.SHARD: pages, Residency.FULL: full_pages or pages},
        )
        self.capacity_pages = min(
            longest_request(each, self.sizes.pages[SPECS[each].residency]) for each in self.config.allowed_layouts
        )
        self.request_tokens = self.capacity_pages * self.config.page_tokens
        self.scheduler = new_scheduler(self.config, self.sizes, self.request_tokens, max_context, expected_output)
        self.max_context = max_context
        self.ranks = SimulatedRanks(self.config, self.sizes)
        self.outputs = Outputs()
        self.plans: list[Plan] = []
        self.traffic: list[Traffic] = []
        """Of each plan."""
        self.preemptions = 0
        self.failing: dict[int, str] = {}
        """Ranks whose copies go wrong in the plans to come, with what they will say."""
        self._in_flight: deque[tuple[StepResult, set[tuple[int, int, int]]]] = deque()
        self._decoding: set[int] = set()  # seeds whose rows of the last plan were sampled from
        self._requests: dict[int, Request] = {}  # by seed
        self._started: set[int] = set()  # seeds of requests that have held cache
        self._at = (0, layout)  # epoch and layout of the last plan

    @property
    def switcher(self) -> Switcher:
        return self.scheduler.switcher

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def add(self, *requests: Request, now: float = 0.0) -> None:
        for r in requests:
            self.scheduler.add(r, now=now)
            self._requests[r.seed] = r

    def request(self, seed: int) -> Request:
        """The one that was added with this seed."""
        return self._requests[seed]

    def limit(self, r: Request) -> int:
        """Most tokens of a request, prompt included."""
        return min(len(r.prompt) + r.sampling.max_tokens, self.max_context, self.request_tokens)

    def cancel(self, name: str) -> None:
        delta = self.scheduler.cancel(name)
        self._decoding = {seed for seed in self._decoding if self._requests[seed].id != name}
        if delta is not None:
            self.outputs.take([delta])

    @property
    def idle(self) -> bool:
        return not self.scheduler.has_requests and not self._in_flight

    def step(self, now: float = 0.0) -> Plan | None:
        """One turn of the orchestrator's loop."""
        plan = self.schedule(now)
        if self._in_flight and (plan is None or len(self._in_flight) == self.config.plans_in_flight):
            self.complete()
        return plan

    def schedule(self, now: float = 0.0) -> Plan | None:
        """The first half of a turn: a plan, which the ranks execute at once."""
        self.outputs.take(self.scheduler.expire(now))
        before = self.switcher.state
        plan = self.scheduler.schedule(now)
        short = bool((self.scheduler.directory.free_pages() == 0).any())
        short |= self.switcher.state is not before and self.switcher.state is State.ABORTING  # which gave room back
        self._check_decodes(plan, short)
        if plan is not None:
            plan = decode(encode(plan))
            self._check(plan)
            self.plans.append(plan)
        self.scheduler.directory.check()
        return plan

    def complete(self) -> None:
        """The second half: the oldest result comes back."""
        self.outputs.take(self.scheduler.complete(self._in_flight.popleft()[0]))
        self.scheduler.directory.check()

    def run(self, max_steps: int = 2000) -> int:
        """Step until idle; the number of steps. Fails when max_steps are not enough."""
        for count in range(max_steps):
            if self.idle:
                self.scheduler.check_idle()
                return count
            self.step()
        raise AssertionError(
            f"not idle after {max_steps} steps: {self.scheduler.num_running} running, "
            f"{self.scheduler.num_waiting} waiting, free pages {self.scheduler.directory.free_pages()}"
        )

    def run_until(self, reached: Callable[[], bool], max_steps: int = 2000) -> None:
        """Step until something is so."""
        for _ in range(max_steps):
            if reached():
                return
            self.step()
        raise AssertionError(f"not reached after {max_steps} steps")

    def settle(self, max_steps: int = 2000, now: float = 0.0) -> int:
        """Step until no switch is under way or waits to begin; the number of steps."""
        for count in range(max_steps):
            if not self.switcher.busy:
                return count
            self.step(now)
        raise AssertionError(f"still {self.switcher.state.value} after {max_steps} steps: {self.switcher.record}")

    def _check(self, plan: Plan) -> None:
        config = self.config
        assert len(set(plan.slot.tolist())) == plan.num_rows, "two rows of one request"
        assert (plan.count >= 1).all() and plan.count.sum() == plan.num_tokens
        assert plan.num_tokens <= config.max_batch_tokens
        assert self.scheduler.num_running <= config.max_running and (plan.slot < config.max_running).all()
        assert len(plan.counts) == config.num_ranks
        everywhere = plan.layout in (Layout.TP, Layout.DOP)
        assert plan.counts.sum() == plan.num_tokens * (config.num_ranks if everywhere else 1)
        assert (np.diff(plan.want_index) > 0).all()
        self._check_switch(plan)
        result = self.ranks.execute(plan, self.failing)
        self._check_budget()
        users = self.ranks.touched | self._users(plan)
        named = {(rank, page): seed for rank, page, seed in users}
        assert len(named) == len(users), "two requests of one plan share a page"
        for _, earlier in self._in_flight:
            for rank, page, seed in earlier:
                assert named.get((rank, page), seed) == seed, "a page of a plan in flight has a new user"
        self._in_flight.append((result, users))

    def _check_switch(self, plan: Plan) -> None:
        """The layout changes with the epoch only, and the first plan of an epoch copies nothing.

        Unless the next switch has begun in it already, which takes that nothing ran since the commit.
        """
        epoch, layout = self._at
        if plan.epoch == epoch:
            assert plan.layout is layout, "another layout in the same epoch"
        else:
            assert plan.epoch > epoch, "an epoch came back"
            copies = len(plan.moves) + len(plan.late_moves) + len(plan.weights)
            assert plan.attempt or not copies and not plan.armed.any(), "a layout begins with copies"
        assert plan.attempt or not (plan.armed.any() or len(plan.late_moves) or len(plan.weights))
        self._at = (plan.epoch, plan.layout)

    def _check_budget(self) -> None:
        """No rank sends or receives more rows and heads for a switch than its budget; new rows come on top."""
        traffic = self.ranks.traffic
        between = traffic.rows - np.diag(np.diag(traffic.rows))
        num_bytes = between * self.sizes.row_bytes + traffic.weights * self.sizes.itemsize
        budget = self.switcher.budget_bytes
        assert (num_bytes.sum(axis=0) <= budget).all() and (num_bytes.sum(axis=1) <= budget).all(), (num_bytes, budget)
        self.traffic.append(traffic)

    def _users(self, plan: Plan) -> set[tuple[int, int, int]]:
        """(rank, page, seed) of all rows."""
        return {
            (rank, page, self.ranks.seed(int(plan.slot[row])))
            for row in range(plan.num_rows)
            for rank, page in self.ranks.held(plan, row)
        }

    def _check_decodes(self, plan: Plan | None, short: bool) -> None:
        """Who was sampled for in the last plan gets a token in this one, unless it ended or pages were short."""
        if plan is None:  # what was preempted in it may be free again already: nothing to tell shortage by
            self._decoding = set()
            return
        rows = zip(plan.slot.tolist(), plan.token[_first(plan)].tolist(), strict=True)
        seeds = {self.ranks.seed(slot) for slot, token in rows if token == LAST_SAMPLED}
        missing = {seed for seed in self._decoding - seeds if self._requests[seed].id not in self.outputs.finish}
        assert not missing or short, "a running request got no token though there was room"
        self._decoding = set()
        admitted = {int(entry["slot"]): int(entry["seed"]) for entry in plan.sampling}
        self.preemptions += len(set(admitted.values()) & self._started)
        self._started |= set(admitted.values())
        sampled = plan.row_of_token[plan.want_index[plan.want_target == SAMPLE]]
        for slot, end in zip(plan.slot[sampled].tolist(), (plan.start + plan.count)[sampled].tolist(), strict=True):
            seed = admitted.get(slot) or self.ranks.seed(slot)
            if end + 1 < self.limit(self._requests[seed]):
                self._decoding.add(seed)


def _first(plan: Plan) -> np.ndarray:
    """[R]: index of each row's first token."""
    return np.cumsum(plan.count) - plan.count
