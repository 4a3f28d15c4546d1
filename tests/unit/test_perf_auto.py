"""The benchmark of following the load on real ranks: its requests end when their time has come, and not before."""

from __future__ import annotations

import msgspec
import numpy as np

from perf.auto_ranks import Endings
from splash_trt.plan import SAMPLING_DTYPE, Plan, StepResult
from splash_trt.simulate.traces import NOT_AFTER, Trace
from tests.plans import empty_plan

EOS = 7


def plan_of(start: list[int], slots: list[int], opened: list[int]) -> Plan:
    """One row of one token in each of `slots`, from `start` on; opened: numbers of the requests that begin there."""
    rows = len(slots)
    sampling = np.zeros(len(opened), SAMPLING_DTYPE)
    sampling["slot"], sampling["seed"] = slots[: len(opened)], opened
    return msgspec.structs.replace(
        empty_plan(1, sampling=sampling),
        slot=np.array(slots, np.int32),
        start=np.array(start, np.int32),
        count=np.ones(rows, np.int32),
        want_index=np.arange(rows, dtype=np.int32),
    )


def test_requests_end_with_their_last_token_alone() -> None:
    load = Trace(
        name="two",
        arrival_s=np.zeros(2),
        prompt_tokens=np.array([4, 2]),
        output_tokens=np.array([3, 2]),
        after=np.full(2, NOT_AFTER),
        wave=np.zeros(2, np.int64),
    )

    def send(plan: Plan):  # type: ignore[no-untyped-def]
        """Ranks whose model says only that the text is over."""
        count = len(plan.want_index)
        result = msgspec.structs.replace(
            StepResult.empty(plan.step), token=np.full(count, EOS), logprob=np.zeros(count)
        )
        return lambda: result

    endings = Endings(send, load, slots=4, eos=EOS)
    told = [
        endings.execute(plan_of(start, [3, 1], opened))().token.tolist()
        for start, opened in (([3, 1], [0, 1]), ([4, 2], []), ([5, 3], []))
    ]
    assert told == [[EOS + 1, EOS + 1], [EOS + 1, EOS], [EOS, EOS + 1]]
