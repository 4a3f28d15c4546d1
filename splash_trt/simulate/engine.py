"""Stands in for the ranks in a simulation: a plan takes as long as the cost model says, and yields made-up tokens.

It knows what the scheduler must not know: after how many tokens each request ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np

from splash_trt.config import EngineConfig, Layout
from splash_trt.migration.diff import Sizes
from splash_trt.plan import Plan, RankStatus, StepResult
from splash_trt.scheduler.batch import Batch
from splash_trt.simulate.clock import SimulatedClock
from splash_trt.simulate.source import Source
from splash_trt.simulate.tally import Tally

END_OF_TEXT = 0
FILLER = 1


class StepCost(Protocol):
    """The part of the cost model that is used here."""

    def step_s(self, batch: Batch) -> float:
        """Seconds that a step takes."""


Price = Callable[[Plan, int], tuple[float, Layout]]
"""(plan, bytes that the rank which moves most sends and receives) -> (seconds, the layout that these are for)."""


def plain_price(cost: StepCost, num_ranks: int) -> Price:
    """A plan takes what the cost model says, in the plan's layout."""

    def price(plan: Plan, moved_bytes: int) -> tuple[float, Layout]:
        return cost.step_s(Batch.of(plan, num_ranks, moved_bytes=moved_bytes)), plan.layout

    return price


def cheapest_price(
    cost: StepCost,
    config: EngineConfig,
    capacity_tokens: dict[Layout, int],
    held_tokens: Callable[[], int],
    waiting: Callable[[], int],
) -> Price:
    """A plan takes what the fastest of these layouts would take: those whose cache, in total, holds the tokens that are
    held now, and the roomiest in any case.

    Owners and homes are those of the plan. But prompts, which these plans compute one after the other, are taken under
    DP to be on as many ranks as there are prompts, in the plan and waiting. Changing the layout from step to step moves
    nothing and takes no time.
    """

    def price(plan: Plan, moved_bytes: int) -> tuple[float, Layout]:
        held = held_tokens()
        batch = Batch.of(plan, config.num_ranks)
        options = []
        for layout, room in capacity_tokens.items():
            if held > room and room < max(capacity_tokens.values()):
                continue
            absorbed = plan.count <= config.most_absorbed(layout)
            if np.array_equal(absorbed, plan.absorbed):
                here = msgspec.structs.replace(batch, layout=layout)
            else:
                here = Batch.of(msgspec.structs.replace(plan, layout=layout, absorbed=absorbed), config.num_ranks)
            if layout is Layout.DP and not absorbed.all():
                here = _spread(here, int((~absorbed).sum()) + waiting())
            options.append((cost.step_s(here), layout))
        return min(options)

    return price


def _spread(batch: Batch, prompts: int) -> Batch:
    """The same work, but that of prompts is spread evenly over `prompts` ranks, those that decode least."""
    ranks = np.argsort(batch.decode_tokens, kind="stable")[:prompts]

    def even(values: np.ndarray) -> np.ndarray:
        out = np.zeros(len(values))
        out[ranks] = values.sum() / len(ranks)
        return out

    return msgspec.structs.replace(
        batch,
        prefill_tokens=even(batch.prefill_tokens),
        prefill_pairs=even(batch.prefill_pairs),
        prefill_context=even(batch.prefill_context),
    )


class SimulatedEngine:
    """`execute` takes a plan as ranks do. It returns a function that advances the clock to the plan's end and returns
    its result.

    A plan begins when it is sent, or when the one before has ended if that is later. Which request is in a slot is
    known by the seed in the plans' sampling parameters: it is the request's number.
    """

    def __init__(self, config: EngineConfig, sizes: Sizes, price: Price, clock: SimulatedClock, source: Source) -> None:
        self.tally = Tally(source.prompt_tokens, source.output_tokens)
        self.seconds_in = dict.fromkeys(Layout, 0.0)
        """Time of the steps that computed something, by layout."""
        self.steps = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.layout = config.layout
        """The layout of the step that ended last."""
        self.changes: list[tuple[float, int]] = [(0.0, int(config.layout))]
        """(time, layout): from when on steps ran under which layout."""
        self._num_ranks = config.num_ranks
        self._sizes = sizes
        self._price = price
        self._clock = clock
        self._source = source
        self._number = np.zeros(config.max_running, np.int64)  # [slots]
        self._final = np.zeros(config.max_running, np.int64)  # [slots] the position of the last token
        # Most results are views of these; a step yields at most one token per request.
        self._fillers = np.full(config.max_running, FILLER)
        self._zeros = np.zeros(config.max_running)
        self._no_ids = np.zeros((config.max_running, 0), np.int64)
        self._no_numbers = np.zeros((config.max_running, 0))
        self._end_s = 0.0  # when the last plan ends
        self._epoch = 0
        self._well = (RankStatus("", 0.0),) * config.num_ranks

    def execute(self, plan: Plan) -> Callable[[], StepResult]:
        if len(plan.sampling):
            self._open(plan.sampling)
        seconds, layout = self._price(plan, self._moved_bytes(plan))
        begin = max(self._clock.now, self._end_s)
        gap = begin - self._end_s
        self._end_s = due = begin + seconds
        if plan.num_tokens:
            self.seconds_in[layout] += seconds
        numbers, ends, final = self._sampled(plan)
        statuses = self._statuses(plan, gap)
        self.steps += 1

        def result() -> StepResult:
            self._clock.advance(due)
            self.tally.step(due, numbers, ends)
            self.output_tokens += len(numbers)
            self.prompt_tokens += plan.num_tokens - len(numbers)
            if plan.layout is not self.layout:
                self.layout = plan.layout
                self.changes.append((due - seconds, int(plan.layout)))
            count = len(numbers)
            token = self._fillers[:count]
            if np.count_nonzero(final):
                self._source.ended(numbers[final].tolist(), due)
                token = np.where(final, END_OF_TEXT, FILLER)
            return StepResult(
                step=plan.step,
                token=token,
                logprob=self._zeros[:count],
                top_token=self._no_ids[:count],
                top_logprob=self._no_numbers[:count],
                seconds=seconds,
                statuses=statuses,
            )

        return result

    def _open(self, sampling: np.ndarray) -> None:
        """Takes note of new requests in slots."""
        slots, numbers = sampling["slot"], sampling["seed"]
        self._number[slots] = numbers
        self._final[slots] = self._source.prompt_tokens[numbers] + self._source.output_tokens[numbers] - 1

    def _sampled(self, plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(requests' numbers, positions of their new tokens, whether these are their last), [W] each."""
        slot, end = plan.slot, plan.start + plan.count
        if len(plan.want_index) != plan.num_tokens:  # otherwise every row is one token, and every token is wanted
            slot, end = slot[plan.want_row], end[plan.want_row]
        return self._number[slot], end, end == self._final[slot]

    def _statuses(self, plan: Plan, gap: float) -> tuple[RankStatus, ...]:
        """The ranks' statuses, which they report after every step that belongs to a switch. gap: before the step."""
        begins, self._epoch = plan.epoch != self._epoch, plan.epoch
        if not (plan.attempt or begins):
            return ()
        return (RankStatus("", gap),) * self._num_ranks if gap else self._well

    def _moved_bytes(self, plan: Plan) -> int:
        """Bytes that the rank which moves most sends and receives, added up, before and after the rows run."""
        if not plan.copies:
            return 0
        sent, received, _ = plan.copied_bytes(self._num_ranks, self._sizes.row_bytes, self._sizes.itemsize)
        return int((sent + received).max())
