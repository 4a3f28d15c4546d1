"""From a plan to the arrays that a step's kernels read. Numpy on the host; nothing here depends on sampled ids.

T_r tokens whose hidden state is on this rank, T tokens of all ranks one rank after another ("stacked"; T = T_r where
all ranks compute all), A absorbed tokens of this rank, N ranks, W wanted positions. A rank's tokens are ordered
absorbed first, in plan order within. With a bucket, sizes are padded to it so that one captured graph serves many
steps; padding reads nothing and writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from splash_plugins.mla_attention import cut
from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.partition import token_ranks
from splash_trt.layout.spec import SPECS, PlacementKind, Tokens
from splash_trt.plan import LAST_SAMPLED, NO_PAGE, SAMPLE, Plan
from splash_trt.runtime.block_tables import BlockTables
from splash_trt.runtime.context_rounds import Round, expanded_rounds, padded_round
from splash_trt.runtime.shapes import Shape, Shapes

NONE = -1
"""Padding in an array of indices."""


@dataclass(frozen=True, kw_only=True)
class StepArrays:
    shape: Shape
    padded: bool
    """To one of the deployment's shapes, which a graph may be captured for."""
    arrays: dict[str, np.ndarray]
    """By name, as `_FIELDS` says; and those of Parts in plugins/mla_attention/cut.py."""
    counts: tuple[int, ...]
    """[N] hidden states of each rank; what collectives on a host's side go by, as kernels go by `offsets`."""
    absorbed_counts: tuple[int, ...]
    """[N] absorbed tokens of each rank."""
    rounds: tuple[Round, ...]
    """Expanded attention's; empty in a step that only decodes."""


class ArrayBuilder:
    """Builds StepArrays for one rank."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        tables: BlockTables,
        shapes: Shapes,
        *,
        heads: Sequence[int],
        num_sms: int = cut.NUM_SMS,
    ) -> None:
        """heads: of attention, each rank's; num_sms: multiprocessors of the device."""
        self._config = config
        self._heads = heads
        self._num_sms = num_sms
        self._rank = rank
        self._tables = tables
        self._shapes = shapes

    def build(self, plan: Plan) -> StepArrays:
        """Padded, if the shapes have one for it."""
        num_ranks = self._config.num_ranks
        spread = SPECS[plan.layout].tokens is Tokens.SPREAD and num_ranks > 1
        row = plan.row_of_token
        absorbed = plan.absorbed[row]
        ranks = self._token_ranks(plan)
        # Absorbed first within each rank.
        order = np.lexsort((np.arange(plan.num_tokens), ~absorbed, ranks))
        counts = np.bincount(ranks, minlength=num_ranks) if spread else np.full(num_ranks, plan.num_tokens)
        here = order[ranks[order] == self._rank] if spread else order
        place = np.empty(plan.num_tokens, np.int64)  # of each token among its rank's hidden states
        first = np.cumsum(counts) - counts if spread else np.zeros(num_ranks, np.int64)
        place[order] = np.arange(plan.num_tokens) - first[ranks[order]]
        step = _Step(plan=plan, row=row, position=plan.position, ranks=ranks, here=here, order=order, place=place)
        num_absorbed = int(absorbed[here].sum())
        per_rank = np.bincount(ranks[absorbed], minlength=num_ranks) if spread else np.full(num_ranks, num_absorbed)
        arrays = {
            "offsets": np.concatenate([[0], np.cumsum(counts)]),
            "absorbed_offsets": np.concatenate([[0], np.cumsum(per_rank)]),
            "num_tokens": np.array([plan.num_tokens]),
        }
        arrays |= self._tokens(step) | self._appends(step) | self._wanted(step)
        reads = self._reads(step, absorbed, arrays)
        shape = self._shapes.of(plan, ranks)
        padded = shape is not None
        if shape is None:
            shape = Shape(
                layout=plan.layout,
                rows=len(here),
                stacked=plan.num_tokens,
                absorbed=num_absorbed,
                reads=reads,
                wanted=len(plan.want_index),
            )
        query = here[num_absorbed:]
        rounds = expanded_rounds(
            plan, self._config, self._rank, self._tables, row[query], step.position[query], num_absorbed
        )
        if shape.context:
            rounds = (padded_round(rounds, shape.context, shape.segments),)
        return StepArrays(
            shape=shape,
            padded=padded,
            arrays=self._sized(arrays, shape),
            counts=tuple(counts.tolist()),
            absorbed_counts=tuple(per_rank.tolist()),
            rounds=rounds,
        )

    def padding(self, shape: Shape) -> StepArrays:
        """A step of that shape in which nobody has a token."""
        empty = {name: np.zeros(0, np.int64) for name in _FIELDS}
        return StepArrays(
            shape=shape,
            padded=True,
            arrays=self._sized(empty, shape),
            counts=(0,) * self._config.num_ranks,
            absorbed_counts=(0,) * self._config.num_ranks,
            rounds=(padded_round((), shape.context, shape.segments),) if shape.context else (),
        )

    def _sized(self, arrays: dict[str, np.ndarray], shape: Shape) -> dict[str, np.ndarray]:
        """Padded, with the contexts cut into parts for the heads that attend to them here."""
        sized = _padded(arrays, shape, self._config.num_ranks, len(self._tables.sampling))
        heads = self._heads[self._rank] if shape.layout is Layout.TP else sum(self._heads)
        found = cut.cut(sized["read_length"], heads, self._num_sms)
        return sized | dict(zip(("part", "read_part", "merged"), found, strict=True))

    def _token_ranks(self, plan: Plan) -> np.ndarray:
        """[T]: the rank that computes each token; this one where all do."""
        ranks = token_ranks(
            plan.layout,
            plan.home,
            plan.start,
            plan.count,
            plan.absorbed,
            num_ranks=self._config.num_ranks,
            page_tokens=self._config.page_tokens,
        )
        return np.full(plan.num_tokens, self._rank, np.int32) if ranks is None else ranks

    def _tokens(self, step: _Step) -> dict[str, np.ndarray]:
        ids = step.plan.token[step.order]
        slot = np.where(ids == LAST_SAMPLED, step.plan.slot[step.row[step.order]], NONE)
        stacked = step.position[step.order]
        return {"ids": ids, "id_slot": slot, "stacked_position": stacked, "position": step.position[step.here]}

    def _appends(self, step: _Step) -> dict[str, np.ndarray]:
        """Where this rank stores the rows that it computes, now and for the layout to come."""
        plan, here = step.plan, step.here
        row, position = step.row[here], step.position[here]
        slot, index = plan.slot[row], position // self._config.page_tokens
        page = self._tables.pages[slot, index]
        placement = SPECS[plan.layout].placement
        if placement is PlacementKind.OWNED:
            stored = plan.home[row] == self._rank
        elif placement is PlacementKind.STRIPED:
            # An absorbed token's row travels with its queries, and its stripe's rank stores it.
            stored = ~plan.absorbed[row] if self._config.num_ranks > 1 else np.ones(len(row), np.bool_)
        else:
            stored = np.ones(len(row), np.bool_)
        assert (page[stored] >= 0).all(), "a row belongs to a page that this rank does not hold"
        target = self._tables.target_pages[slot, index] if len(plan.armed) else np.full(len(row), NO_PAGE)
        wanted = (target != page) & plan.armed[row] if len(plan.armed) else np.zeros(len(row), np.bool_)
        return {
            "page": np.where(stored, page, NO_PAGE),
            "offset": position % self._config.page_tokens,
            "target_page": np.where(wanted, target, NO_PAGE),
        }

    def _wanted(self, step: _Step) -> dict[str, np.ndarray]:
        plan, token = step.plan, step.plan.want_index
        slot = plan.slot[step.row[token]]
        sampling = self._tables.sampling[slot]
        return {
            "want_rank": step.ranks[token],
            "want_row": step.place[token],
            # What is only scored leaves no id behind.
            "want_slot": np.where(plan.want_target == SAMPLE, slot, len(self._tables.sampling)),
            "temperature": sampling["temperature"],
            "seed": sampling["seed"],
            "want_position": step.position[token] + 1,
        }

    def _reads(self, step: _Step, absorbed: np.ndarray, arrays: dict[str, np.ndarray]) -> int:
        """Which absorbed queries this rank attends to, and over which of its pages. Returns how many."""
        plan, num_ranks = step.plan, self._config.num_ranks
        mine = step.here[absorbed[step.here]]
        arrays["owned"] = arrays["owner"] = arrays["owner_place"] = np.zeros(0, np.int32)
        arrays["stripe_page"] = arrays["stripe_offset"] = np.zeros(0, np.int32)
        read, first, stride = mine, np.zeros(len(mine), np.int32), 1
        if num_ranks > 1 and plan.layout is Layout.DOP:
            owner = plan.home[step.row[mine]]
            owned = np.flatnonzero(owner == self._rank)
            in_owner = np.zeros(len(mine), np.int64)
            for rank in range(num_ranks):
                at = np.flatnonzero(owner == rank)
                in_owner[at] = np.arange(len(at))
            arrays |= {"owned": owned, "owner": owner, "owner_place": in_owner}
            read = mine[owned]
            first = np.zeros(len(read), np.int32)
        elif num_ranks > 1 and plan.layout is Layout.CP:
            read, stride = step.order[absorbed[step.order]], num_ranks
            first = (self._rank - plan.home[step.row[read]]) % num_ranks
            arrays |= self._stripes(step, read)
        rows = step.position[read] + 1
        arrays["read_slot"] = plan.slot[step.row[read]]
        arrays["read_first"] = first
        arrays["read_length"] = rows if stride == 1 else stripe_rows(rows, first, stride, self._config.page_tokens)
        return len(read)

    def _stripes(self, step: _Step, read: np.ndarray) -> dict[str, np.ndarray]:
        """Where this rank stores the travelling rows of the tokens in `read`: those of its stripe."""
        plan, size = step.plan, self._config.page_tokens
        row, position = step.row[read], step.position[read]
        stored = (plan.home[row] + position // size) % self._config.num_ranks == self._rank
        page = np.where(stored, self._tables.pages[plan.slot[row], position // size], NO_PAGE)
        assert (page[stored] >= 0).all(), "a row belongs to a page that this rank does not hold"
        return {"stripe_page": page, "stripe_offset": position % size}


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A plan's tokens, in plan order unless said."""

    plan: Plan
    row: np.ndarray
    position: np.ndarray
    ranks: np.ndarray
    here: np.ndarray
    """This rank's tokens, in the order of its hidden states."""
    order: np.ndarray
    """All tokens in stacked order."""
    place: np.ndarray
    """Each token's index among its rank's hidden states."""


def stripe_rows(rows: np.ndarray, first: np.ndarray, stride: int, size: int) -> np.ndarray:
    """How many of a context's first `rows` rows lie in pages first, first + stride, …: a prefix of those pages' rows,
    since only the context's last page is not full."""
    full, rest = rows // size, rows % size
    length = np.maximum(full - first + stride - 1, 0) // stride * size
    return length + np.where((rest > 0) & (full % stride == first), rest, 0)


# Name -> (which size of Shape it has, what padding holds, dtype). "ranks": N + 1 numbers; MAX_SLOT: one past the slots.
MAX_SLOT = -2
_FIELDS: dict[str, tuple[str, int, type[np.generic]]] = {
    "offsets": ("ranks", 0, np.int32),
    "absorbed_offsets": ("ranks", 0, np.int32),
    "num_tokens": ("one", 0, np.int32),
    "ids": ("stacked", NONE, np.int32),
    "id_slot": ("stacked", NONE, np.int32),
    "stacked_position": ("stacked", 0, np.int32),
    "position": ("rows", 0, np.int32),
    "page": ("rows", NO_PAGE, np.int32),
    "offset": ("rows", 0, np.int32),
    "target_page": ("rows", NO_PAGE, np.int32),
    "read_slot": ("reads", 0, np.int32),
    "read_first": ("reads", 0, np.int32),
    "read_length": ("reads", 0, np.int32),
    "owned": ("owned", NONE, np.int32),
    "owner": ("owner", NONE, np.int32),
    "owner_place": ("owner", NONE, np.int32),
    "stripe_page": ("stripe", NO_PAGE, np.int32),
    "stripe_offset": ("stripe", 0, np.int32),
    "want_rank": ("wanted", NONE, np.int32),
    "want_row": ("wanted", 0, np.int32),
    "want_slot": ("wanted", MAX_SLOT, np.int64),
    "temperature": ("wanted", 0, np.float64),
    "seed": ("wanted", 0, np.int64),
    "want_position": ("wanted", 0, np.int64),
}


def _padded(arrays: dict[str, np.ndarray], shape: Shape, num_ranks: int, max_slots: int) -> dict[str, np.ndarray]:
    """At the sizes of `shape`, as _FIELDS says."""
    exchanges = num_ranks > 1
    sizes = {
        "ranks": num_ranks + 1,
        "one": 1,
        "stacked": shape.stacked,
        "rows": shape.rows,
        "reads": shape.reads,
        "wanted": shape.wanted,
        "owned": shape.reads if exchanges and shape.layout is Layout.DOP else 0,
        "owner": shape.absorbed if exchanges and shape.layout is Layout.DOP else 0,
        "stripe": shape.reads if exchanges and shape.layout is Layout.CP else 0,
    }
    out = {}
    for name, (size, padding, dtype) in _FIELDS.items():
        values = arrays[name]
        assert len(values) <= sizes[size], (name, len(values), shape)
        out[name] = np.full(sizes[size], max_slots if padding == MAX_SLOT else padding, dtype)
        out[name][: len(values)] = values
    return out
