"""From a plan to the index tensors of one rank's step. Numpy on the host; nothing here depends on sampled ids.

T tokens in plan order, T_r of them on this rank (in plan order too), N ranks, W wanted positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from splash_trt.config import EngineConfig
from splash_trt.layout.partition import token_ranks
from splash_trt.layout.spec import SPECS, PlacementKind
from splash_trt.plan import LAST_SAMPLED, NO_PAGE, Plan
from splash_trt.runtime.rounds import Round, context_rounds, index_tensor
from splash_trt.runtime.step_arrays import stripe_rows
from splash_trt.runtime.tables import SlotTables


@dataclass(frozen=True, kw_only=True)
class Append:
    """Rows that this rank computed and stores: rows[source] go to (page, offset). All [n] int64."""

    source: torch.Tensor
    page: torch.Tensor
    offset: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Context:
    """Absorbed queries' context on this rank: tables [n, P] int64 of page ids, length [n] int64 of rows."""

    tables: torch.Tensor
    length: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Absorbed:
    """The step's absorbed tokens. The ranks that attend to a token are called its readers.

    here [A_r] int64: those among the T_r hidden states of this rank. readers[r]: indices below A_r of the tokens that
    rank r reads. num_from[r]: how many tokens rank r sends here to read; `context` is theirs, one rank after another.
    append: the cache rows among the received ones that this rank stores (only where rows travel: CP).
    """

    here: torch.Tensor
    readers: tuple[torch.Tensor, ...]
    num_from: tuple[int, ...]
    context: Context
    append: Append


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    plan: Plan
    counts: tuple[int, ...]
    order: torch.Tensor
    """[T] int64: plan order to the order in which ranks' tokens are stacked."""
    token: torch.Tensor
    """[T] int64 ids in stacked order; those of `sampled_at` are still to be filled in."""
    sampled_at: torch.Tensor
    """Stacked positions whose id is the one last sampled for …"""
    sampled_slot: torch.Tensor
    """… these slots."""
    position: torch.Tensor
    """[T_r] int64 of this rank's tokens."""
    append: Append
    append_target: Append
    """Rows that this rank computed and will store in the layout to come; empty unless a switch is under way."""
    absorbed: Absorbed | None
    """None if no rank has any absorbed token in this step."""
    expanded: torch.Tensor
    """[n] int64: this rank's hidden states of expanded rows."""
    rounds: tuple[Round, ...]
    want_here: torch.Tensor
    """This rank's hidden states whose logits are wanted."""
    want_counts: tuple[int, ...]
    want_order: torch.Tensor
    """[W] int64: from stacked order to plan order."""


class InputBuilder:
    """Builds StepInputs for one rank."""

    def __init__(self, config: EngineConfig, rank: int, tables: SlotTables) -> None:
        self._config = config
        self._rank = rank
        self._tables = tables

    def build(self, plan: Plan) -> StepInputs:
        config, num_ranks = self._config, self._config.num_ranks
        ranks = token_ranks(
            plan.layout,
            plan.home,
            plan.start,
            plan.count,
            plan.absorbed,
            num_ranks=num_ranks,
            page_tokens=config.page_tokens,
        )
        everywhere = ranks is None
        rank_of = np.full(plan.num_tokens, self._rank, np.int32) if ranks is None else ranks
        here = np.flatnonzero(rank_of == self._rank)
        order = np.argsort(rank_of, kind="stable")
        row, position = plan.row_of_token, plan.position
        token = plan.token[order]
        sampled = np.flatnonzero(token == LAST_SAMPLED)
        absorbed = plan.absorbed[row]
        want_rank = rank_of[plan.want_index]
        want_stack = np.argsort(want_rank, kind="stable")
        local = np.full(plan.num_tokens, -1)
        local[here] = np.arange(len(here))
        expanded = np.flatnonzero(~absorbed[here])
        return StepInputs(
            plan=plan,
            counts=tuple(plan.counts.tolist()),
            order=index_tensor(order),
            token=index_tensor(token),
            sampled_at=index_tensor(sampled),
            sampled_slot=index_tensor(plan.slot[row[order[sampled]]]),
            position=index_tensor(position[here]),
            append=self._append(plan, here, row, position),
            append_target=self._append_target(plan, here, row, position),
            absorbed=self._absorbed(plan, rank_of, here, row, position) if absorbed.any() else None,
            expanded=index_tensor(expanded),
            rounds=context_rounds(plan, config, self._rank, self._tables.pages, here[expanded], local),
            want_here=index_tensor(local[plan.want_index[want_rank == self._rank]]),
            want_counts=tuple(
                np.full(num_ranks, len(plan.want_index)) if everywhere else np.bincount(want_rank, minlength=num_ranks)
            ),
            want_order=index_tensor(np.argsort(want_stack)),
        )

    def _where(self, slot: np.ndarray, position: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(page id, offset) on this rank of each position of each slot."""
        page = self._tables.pages[slot, position // self._config.page_tokens]
        assert (page >= 0).all(), "a row belongs to a page that this rank does not hold"
        return index_tensor(page), index_tensor(position % self._config.page_tokens)

    def _append(self, plan: Plan, here: np.ndarray, row: np.ndarray, position: np.ndarray) -> Append:
        """Rows of this rank's own tokens. In CP absorbed tokens' rows travel with their queries instead."""
        placement = SPECS[plan.layout].placement
        keep = np.ones(len(here), np.bool_)
        if placement is PlacementKind.OWNED:
            keep = plan.home[row[here]] == self._rank
        elif placement is PlacementKind.STRIPED:
            keep = ~plan.absorbed[row[here]]
        source = np.flatnonzero(keep)
        page, offset = self._where(plan.slot[row[here[source]]], position[here[source]])
        return Append(source=index_tensor(source), page=page, offset=offset)

    def _append_target(self, plan: Plan, here: np.ndarray, row: np.ndarray, position: np.ndarray) -> Append:
        """Rows of armed requests whose page here in the target tables is another than today's."""
        armed = np.flatnonzero(plan.armed[row[here]])
        slot, at = plan.slot[row[here[armed]]], position[here[armed]]
        index = at // self._config.page_tokens
        page = self._tables.target_pages[slot, index]
        keep = np.flatnonzero((page != NO_PAGE) & (page != self._tables.pages[slot, index]))
        offset = at[keep] % self._config.page_tokens
        return Append(source=index_tensor(armed[keep]), page=index_tensor(page[keep]), offset=index_tensor(offset))

    def _absorbed(
        self, plan: Plan, rank_of: np.ndarray, here: np.ndarray, row: np.ndarray, position: np.ndarray
    ) -> Absorbed:
        """Who reads which absorbed token: the owner (DOP), the ranks with a page of its context (CP), else its rank."""
        ranks = np.arange(self._config.num_ranks)
        token = np.flatnonzero(plan.absorbed[row])  # [A] of the whole plan
        home = plan.home[row[token]]
        placement = SPECS[plan.layout].placement
        pages = position[token] // self._config.page_tokens + 1  # a token's own page included
        if placement is PlacementKind.STRIPED:
            reads = (ranks - home[:, None]) % len(ranks) < pages[:, None]  # [A, N]
        elif placement is PlacementKind.OWNED:
            reads = home[:, None] == ranks
        else:
            reads = np.broadcast_to(ranks == self._rank, (len(token), len(ranks)))
        mine = np.flatnonzero(rank_of[token] == self._rank)
        received, num_from = [], []
        for source in ranks.tolist():
            sends = rank_of[token] == source if placement is PlacementKind.STRIPED else ranks[source] == self._rank
            got = token[np.flatnonzero(sends & reads[:, self._rank])]
            received.append(got)
            num_from.append(len(got))
        read = np.concatenate(received)
        stored = self._stored(plan, read, row, position) if placement is PlacementKind.STRIPED else read[:0]
        page, offset = self._where(plan.slot[row[read[stored]]], position[read[stored]])
        return Absorbed(
            here=index_tensor(np.searchsorted(here, token[mine])),
            readers=tuple(index_tensor(np.flatnonzero(reads[mine, r])) for r in ranks),
            num_from=tuple(num_from),
            context=self._context(plan, read, row, position),
            append=Append(source=index_tensor(stored), page=page, offset=offset),
        )

    def _stored(self, plan: Plan, read: np.ndarray, row: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Which of the tokens read here have their own cache row in this rank's stripe."""
        page = position[read] // self._config.page_tokens
        return np.flatnonzero((plan.home[row[read]] + page) % self._config.num_ranks == self._rank)

    def _context(self, plan: Plan, read: np.ndarray, row: np.ndarray, position: np.ndarray) -> Context:
        """Pages and rows of the context on this rank, the tokens' own rows included.

        A stripe's pages but the request's last are full, so what a rank holds of a context is a prefix of the rows of
        its own pages, and the same kernel serves all placements.
        """
        size, num_ranks = self._config.page_tokens, self._config.num_ranks
        slot, rows = plan.slot[row[read]], position[read].astype(np.int64) + 1
        if SPECS[plan.layout].placement is not PlacementKind.STRIPED:
            used = -(-int(rows.max(initial=0)) // size)
            return Context(tables=index_tensor(self._tables.pages[slot, :used]), length=index_tensor(rows))
        first = (self._rank - plan.home[row[read]]) % num_ranks
        length = stripe_rows(rows, first, num_ranks, size)
        used = -(-int(length.max(initial=0)) // size)
        columns = first[:, None] + num_ranks * np.arange(used)
        table = self._tables.pages[slot[:, None], np.minimum(columns, self._tables.pages.shape[1] - 1)]
        return Context(tables=index_tensor(table), length=index_tensor(length))
