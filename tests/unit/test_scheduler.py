"""One scheduler in situations made by hand. tests/oracles/checked_scheduler.py checks every plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from splash_trt.config import Layout
from splash_trt.plan import SAMPLE
from splash_trt.request import FinishReason
from tests.oracles.checked_scheduler import EOS, CheckedScheduler, request
from tests.oracles.simulated_ranks import VOCAB, expected_tokens, logprob, next_token

LAYOUTS = list(Layout)


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_all_running_requests_short_of_a_page_in_one_step(plans_in_flight: int) -> None:
    c = CheckedScheduler((4,), plans_in_flight=plans_in_flight)
    pair = [request("a", 4, 10), request("b", 4, 10)]
    c.add(*pair)
    c.run(100)
    assert c.preemptions > 0
    for r in pair:
        assert c.outputs.tokens[r.id] == expected_tokens(r)
