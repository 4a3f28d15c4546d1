"""Plans survive the wire unchanged, and derived arrays follow from the stored ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash_trt.config import Layout
from splash_trt.plan import (
    LAST_SAMPLED,
    SAMPLE,
    SAMPLING_DTYPE,
    Plan,
    SlotControls,
    decode,
    encode,
    encode_controls,
)
from splash_trt.request import Grammar, GrammarKind

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)


def _array(draw: st.DrawFn, values: st.SearchStrategy[Any], dtype: Any, *, rows: int | None = None) -> np.ndarray:
    size = draw(st.integers(0, 5)) if rows is None else rows
    return np.array(draw(st.lists(values, min_size=size, max_size=size)), dtype)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any values of the right types: the wire does not care whether they make sense."""
    rows, wants = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    row_fields = {name: _array(draw, INT32, np.int32, rows=rows) for name in ("slot", "start", "count", "home")}
    quads = {name: _array(draw, st.tuples(*[INT32] * 4), np.int32).reshape(-1, 4) for name in ("tables", "moves")}
    real = st.floats(allow_nan=False)
    sampling = st.tuples(INT32, INT32, real, real, real, INT64, INT32)
    return Plan(
        step=draw(INT64),
        epoch=draw(INT64),
        layout=draw(st.sampled_from(list(Layout))),
        absorbed=_array(draw, st.booleans(), np.bool_, rows=rows),
        token=_array(draw, INT64, np.int64),
        want_index=_array(draw, INT32, np.int32, rows=wants),
        want_target=_array(draw, INT64, np.int64, rows=wants),
        counts=_array(draw, INT32, np.int32),
        sampling=_array(draw, sampling, SAMPLING_DTYPE),
        controls=_array(draw, st.integers(0, 255), np.uint8),
        controlled=_array(draw, INT32, np.int32),
        **row_fields,
        **quads,
    )


def _assert_equal(a: Plan, b: Plan) -> None:
    for field in Plan.__struct_fields__:
        left, right = getattr(a, field), getattr(b, field)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype and left.shape == right.shape, field
            assert left.tobytes() == right.tobytes(), field
        else:
            assert left == right and type(left) is type(right), field


@settings(deadline=None, derandomize=True)
@given(plans())
def test_round_trip(plan: Plan) -> None:
    _assert_equal(decode(encode(plan)), plan)


def _plan(**changes: Any) -> Plan:
    """Rows of 1, 3 and 2 tokens."""
    return Plan(
        **{
            "step": 1,
            "epoch": 0,
            "layout": Layout.CP,
            "slot": np.array([4, 0, 2], np.int32),
            "start": np.array([9, 0, 5], np.int32),
            "count": np.array([1, 3, 2], np.int32),
            "home": np.zeros(3, np.int32),
            "absorbed": np.array([True, False, False]),
            "token": np.array([LAST_SAMPLED, 5, 6, 7, 8, 9], np.int64),
            "want_index": np.array([0, 3], np.int32),
            "want_target": np.array([SAMPLE, SAMPLE], np.int64),
            "counts": np.array([6], np.int32),
            **changes,
        }
    )


def test_rows_and_positions_of_tokens() -> None:
    plan = _plan()
    assert (plan.num_rows, plan.num_tokens) == (3, 6)
    assert plan.row_of_token.tolist() == [0, 1, 1, 1, 2, 2]
    assert plan.position.tolist() == [9, 0, 1, 2, 5, 6]
    assert plan.row_of_token.dtype == plan.position.dtype == np.int32


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 50)), max_size=20))
def test_positions_count_on_from_each_rows_start(rows: list[tuple[int, int]]) -> None:
    start, count = (np.array([r[i] for r in rows], np.int32) for i in (0, 1))
    wanted = np.arange(count.sum(), dtype=np.int32)[::3]
    plan = _plan(
        start=start, count=count, slot=np.arange(len(rows)), token=np.zeros(count.sum(), np.int64), want_index=wanted
    )
    assert plan.position.tolist() == [p for s, c in rows for p in range(s, s + c)]
    assert plan.row_of_token.tolist() == [i for i, (_, c) in enumerate(rows) for _ in range(c)]
    assert plan.want_row.tolist() == plan.row_of_token[plan.want_index].tolist()


def test_a_plan_without_rows() -> None:
    empty = np.zeros(0, np.int32)
    plan = _plan(
        **dict.fromkeys(("slot", "start", "count", "home", "want_index"), empty),
        absorbed=empty.astype(np.bool_),
        token=empty.astype(np.int64),
        want_target=empty.astype(np.int64),
        counts=np.zeros(1, np.int32),
    )
    assert plan.position.tolist() == plan.row_of_token.tolist() == []
    _assert_equal(decode(encode(plan)), plan)


def test_controls_travel_as_they_are() -> None:
    controls = [
        SlotControls(
            slot=3,
            prompt=np.array([5, 2**31 - 1], np.int32).tobytes(),
            output=b"",
            penalties=(1.5, -2.0, 0.1),
            logit_bias={0: -100.0, 2**31 - 1: 0.5},
            stop_token_ids=(1, 9),
            free_from=2**31 - 1,
            grammar=Grammar(GrammarKind.LARK, 'start: "\u00e4\U0001f600"'),
        ),
        SlotControls(0, b"", b"", None, {}, (), 0, None),
    ]
    plan = _plan(controls=encode_controls(controls), controlled=np.array([0, 3], np.int32))
    assert decode(encode(plan)).slot_controls == plan.slot_controls == controls
    assert _plan().slot_controls == [] and len(encode_controls([])) == 0


@pytest.mark.parametrize("name", ["slot", "token", "absorbed", "tables", "want_target"])
def test_a_wrong_dtype_is_a_bug_and_not_sent(name: str) -> None:
    with pytest.raises(AssertionError, match=name):
        encode(_plan(**{name: np.zeros(3, np.float32)}))


def test_a_view_with_strides_is_sent_by_value() -> None:
    tables = np.arange(40, dtype=np.int32).reshape(10, 4)[::3]
    assert decode(encode(_plan(tables=tables))).tables.tolist() == tables.tolist()
