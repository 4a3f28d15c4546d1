"""A plan: what all ranks execute in one step. Rank 0 makes it and sends the same bytes to all; ranks need nothing else.

Shapes: R rows (one request's tokens in this step), T tokens over all rows in row order, W wanted positions, N ranks.
One array per field and no object per row: at thousands of rows the arrays stay cheap to make, send and read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from splash_trt.config import Layout
from splash_trt.request import Grammar

LAST_SAMPLED = -1  # in `token`: the id that the sampler last gave this row's slot
SAMPLE = -1  # in `want_target`: choose a token here; any other value is scored only
NO_PAGE = -1  # in a block table: this rank does not hold the page

SAMPLING_DTYPE = np.dtype(
    [
        ("slot", np.int32),
        ("top_k", np.int32),
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.int64),
        ("logprobs", np.int32),  # alternatives wanted, -1: no log-probabilities
    ]
)


class SlotControls(msgspec.Struct, frozen=True, array_like=True):
    """What ranks need beyond SAMPLING_DTYPE for a slot whose sampling parameters are `controlled`. It is sent once,
    when the slot is opened.

    It includes the output so far, so that a preempted request goes on as if it had not been preempted.
    """

    slot: int
    prompt: bytes
    """The prompt's ids as int32; empty unless the repetition penalty needs them."""
    output: bytes
    """The ids generated so far, as int32."""
    penalties: tuple[float, float, float] | None
    """Repetition, frequency, presence; None: there are none."""
    logit_bias: dict[int, float]
    stop_token_ids: tuple[int, ...]
    free_from: int
    """The first position at which the output may end, which follows from min_tokens; at most 2**31 - 1."""
    grammar: Grammar | None


# Empty arrays, which most plans have in most fields.
NO_TABLES = np.zeros((0, 4), np.int32)
NO_MOVES = np.zeros((0, 6), np.int32)
NO_WEIGHTS = np.zeros((0, 5), np.int64)
NO_SAMPLING = np.zeros(0, SAMPLING_DTYPE)
NO_CONTROLS = np.zeros(0, np.uint8)
NO_SLOTS = np.zeros(0, np.int32)
NO_ROWS = np.zeros(0, np.bool_)


class Plan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One step. In this order: the epoch, `sampling` and tables take effect; `moves` and `weights` are copied; the rows
    run; `late_moves` are copied."""

    step: int
    epoch: int
    """Counts layout changes."""
    layout: Layout
    slot: np.ndarray
    """[R] int32: the request's slot, below max_slots; names its block table and sampling parameters."""
    start: np.ndarray
    """[R] int32: position of the row's first token."""
    count: np.ndarray
    """[R] int32: tokens in the row, at least 1."""
    home: np.ndarray
    """[R] int32: the rank that owns the request (DP, DOP) or holds its page 0 (CP); 0 in TP."""
    absorbed: np.ndarray
    """[R] bool: attend against latent rows (decode) instead of expanded keys and values (prefill)."""
    token: np.ndarray
    """[T] int64: input ids, or LAST_SAMPLED."""
    want_index: np.ndarray
    """[W] int32, ascending: tokens (index below T) whose next-token distribution is needed."""
    want_target: np.ndarray
    """[W] int64: SAMPLE, or the id whose log-probability is asked for."""
    counts: np.ndarray
    """[N] int32: tokens whose hidden state each rank computes, zero allowed."""
    tables: np.ndarray = NO_TABLES
    """[C, 4] int32: rank, slot, page index, page id: block-table entries that change before the step."""
    sampling: np.ndarray = NO_SAMPLING
    """[P] of SAMPLING_DTYPE: parameters of slots that are new to the ranks."""
    controls: np.ndarray = NO_CONTROLS
    """[B] uint8: msgpack of a list of SlotControls, for those of `sampling` that need them; empty if none does."""
    controlled: np.ndarray = NO_SLOTS
    """[C] int32, ascending: all slots that have controls now. Ranks forget the controls of all other slots."""
    moves: np.ndarray = NO_MOVES
    """[M, 6] int32: source rank, source page, target rank, target page, first row, rows: copies before the rows run."""
    attempt: int = 0
    """Numbers the switch under way; 0: none. When it changes, target tables are forgotten."""
    armed: np.ndarray = NO_ROWS
    """[R] bool: the row's new cache rows are also written wherever its target table wants them."""
    target_tables: np.ndarray = NO_TABLES
    """[C, 4] int32: like `tables`, for where the cache will be; the next epoch begins with these."""
    late_moves: np.ndarray = NO_MOVES
    """[M, 6] int32: like `moves`, but copied after the rows have run: new rows, to ranks that did not compute them."""
    weights: np.ndarray = NO_WEIGHTS
    """[K, 5] int64: source rank, target rank, head-cut tensor, first and end number in the source's part of it."""

    @property
    def num_rows(self) -> int:
        return len(self.slot)

    @property
    def num_tokens(self) -> int:
        return len(self.token)

    @property
    def only_decodes(self) -> bool:
        """Every row attends absorbed."""
        return np.count_nonzero(self.absorbed) == len(self.absorbed)

    @property
    def is_empty(self) -> bool:
        """Nothing to compute, to move or to tell."""
        if len(self.token):
            return False
        parts = (self.tables, self.sampling, self.moves, self.target_tables, self.late_moves, self.weights)
        return not any(len(part) for part in parts)

    @property
    def copies(self) -> bool:
        """Whether the plan copies cache rows or weights."""
        return bool(len(self.moves) or len(self.late_moves) or len(self.weights))

    def copied_bytes(
        self, num_ranks: int, row_bytes: int, number_bytes: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[N] int64 each: bytes that ranks send to others, receive from others, and copy inside themselves.

        row_bytes: of one token's cache row, all layers; number_bytes: of one number of the head-cut weights.
        """
        sent, received, inside = (np.zeros(num_ranks, np.int64) for _ in range(3))
        parts = [(m[:, 0], m[:, 2], m[:, 5] * np.int64(row_bytes)) for m in (self.moves, self.late_moves)]
        weights = self.weights
        parts.append((weights[:, 0], weights[:, 1], (weights[:, 4] - weights[:, 3]) * number_bytes))
        for source, target, num_bytes in parts:
            stays = source == target
            np.add.at(inside, source[stays], num_bytes[stays])
            np.add.at(sent, source[~stays], num_bytes[~stays])
            np.add.at(received, target[~stays], num_bytes[~stays])
        return sent, received, inside

    @property
    def slot_controls(self) -> list[SlotControls]:
        """What `controls` holds."""
        return _control_decoder.decode(self.controls.tobytes()) if len(self.controls) else []

    @property
    def row_of_token(self) -> np.ndarray:
        """[T] int32: the row each token belongs to."""
        return np.repeat(np.arange(len(self.count), dtype=np.int32), self.count)

    @property
    def want_row(self) -> np.ndarray:
        """[W] int64: the row each wanted token belongs to."""
        return np.searchsorted(np.cumsum(self.count), self.want_index, side="right")

    @property
    def position(self) -> np.ndarray:
        """[T] int32: each token's position in its request."""
        first = np.cumsum(self.count) - self.count
        return np.arange(self.num_tokens, dtype=np.int32) + np.repeat(self.start - first, self.count).astype(np.int32)


@dataclass(frozen=True)
class RankStatus:
    """A rank's part in a switch, as it reports it after a step."""

    error: str
    """Why a copy of this step failed; empty: all went well."""
    gap_s: float
    """Time between the end of the rank's previous step and the begin of this one."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What the sampler found, the same on every rank. W and order as in the plan."""

    step: int
    token: np.ndarray
    """[W] int64: the sampled id, or the target."""
    logprob: np.ndarray
    """[W] float64: natural-log probability of `token`."""
    top_token: np.ndarray
    """[W, K] int64: the K likeliest ids, best first; K is the most that any row asks for, maybe 0."""
    top_logprob: np.ndarray
    """[W, K] float64."""
    errors: dict[int, str] = {}
    """Index below W -> why no token could be chosen there; its request cannot go on."""
    seconds: float = 0.0
    """What the step took on rank 0."""
    statuses: tuple[RankStatus, ...] = ()
    """Of each rank, after a step that belongs to a switch."""

    @classmethod
    def empty(cls, step: int) -> StepResult:
        """Of a plan without rows."""
        ids, numbers = np.zeros(0, np.int64), np.zeros(0)
        return cls(
            step=step, token=ids, logprob=numbers, top_token=ids.reshape(0, 0), top_logprob=numbers.reshape(0, 0)
        )


_SCALARS = ("step", "epoch", "layout", "attempt")
_ARRAYS = [name for name in Plan.__struct_fields__ if name not in _SCALARS]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict)
_control_decoder = msgspec.msgpack.Decoder(list[SlotControls])


def encode_controls(controls: list[SlotControls]) -> np.ndarray:
    """As Plan.controls has them."""
    return np.frombuffer(_encoder.encode(controls), np.uint8) if controls else NO_CONTROLS


def encode(plan: Plan) -> bytes:
    """The plan as msgpack: scalars as they are, arrays as (shape, bytes); dtypes are those of the class."""
    out: dict[str, object] = {name: int(getattr(plan, name)) for name in _SCALARS}
    for name in _ARRAYS:
        array = getattr(plan, name)
        assert array.dtype == _DTYPES[name], (name, array.dtype)
        out[name] = (array.shape, array.tobytes())
    return _encoder.encode(out)


def decode(data: bytes) -> Plan:
    """The inverse of `encode`; its arrays are read-only views of `data`."""
    raw = _decoder.decode(data)
    values: dict[str, Any] = {name: raw[name] for name in _SCALARS} | {"layout": Layout(raw["layout"])}
    for name in _ARRAYS:
        shape, bytes_ = raw[name]
        values[name] = np.frombuffer(bytes_, _DTYPES[name]).reshape(shape)
    return Plan(**values)


_DTYPES = {name: np.dtype(np.int32) for name in _ARRAYS} | {
    "absorbed": np.dtype(np.bool_),
    "armed": np.dtype(np.bool_),
    "weights": np.dtype(np.int64),
    "token": np.dtype(np.int64),
    "want_target": np.dtype(np.int64),
    "sampling": SAMPLING_DTYPE,
    "controls": np.dtype(np.uint8),
}
