"""Plans made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from splash_trt.config import Layout
from splash_trt.plan import Plan


def empty_plan(num_ranks: int, **parts: Any) -> Plan:
    """TP's, of a switch under way, without rows and with `parts`."""
    ints = np.zeros(0, np.int32)
    return Plan(
        step=1,
        epoch=0,
        layout=Layout.TP,
        slot=ints,
        start=ints,
        count=ints,
        home=ints,
        absorbed=np.zeros(0, np.bool_),
        token=np.zeros(0, np.int64),
        want_index=ints,
        want_target=np.zeros(0, np.int64),
        counts=np.zeros(num_ranks, np.int32),
        attempt=1,
        **parts,
    )
