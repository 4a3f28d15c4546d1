"""Cuts the contexts of expanded attention into rounds: context rows that are up-projected together, and where they lie.

A round has at most context_block_tokens rows, of one request or several. Where tokens attend to rows on other ranks
(CP, DOP), all ranks make the same rounds, since they have to meet before each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import SPECS, PlacementKind
from splash_trt.plan import NO_PAGE, Plan
from splash_trt.runtime.block_tables import BlockTables


@dataclass(frozen=True, kw_only=True)
class Round:
    """C context rows and who attends to them."""

    num_rows: int
    """C."""
    holder: np.ndarray
    """[C] int32: the rank whose page holds the row."""
    page: np.ndarray
    """[C] int32: the page there."""
    offset: np.ndarray
    """[C] int32: the row in it."""
    segments: np.ndarray
    """[S, 5] int32: queries begin, end (among this rank's hidden states), keys begin, end (rows of this round), first
    key's position. Only of requests with queries here that see any of these keys."""


def cut_into_rounds(ends: list[tuple[int, int]], block: int) -> list[list[tuple[int, int, int]]]:
    """Cut contexts [(row, length)] into rounds of pieces (row, first position, end), at most `block` rows a round."""
    rounds: list[list[tuple[int, int, int]]] = []
    room = 0
    for row, length in ends:
        begin = 0
        while begin < length:
            if room == 0:
                rounds.append([])
                room = block
            take = min(room, length - begin)
            rounds[-1].append((row, begin, begin + take))
            begin += take
            room -= take
    return rounds


def shared_rounds(layout: Layout, num_ranks: int) -> bool:
    """Whether context rows lie on other ranks too."""
    return num_ranks > 1 and layout in (Layout.CP, Layout.DOP)


def expanded_rounds(
    plan: Plan,
    config: EngineConfig,
    rank: int,
    tables: BlockTables,
    query_row: np.ndarray,
    query_position: np.ndarray,
    first_query: int,
) -> tuple[Round, ...]:
    """One rank's rounds. query_row, query_position [n]: row and position of its expanded tokens, rows ascending.
    first_query: the index of the first one's hidden state."""
    rows = np.flatnonzero(~plan.absorbed)
    shared = shared_rounds(plan.layout, config.num_ranks)
    if plan.layout is Layout.DP:
        rows = rows[plan.home[rows] == rank]
    if not len(rows):
        return ()
    length = plan.start + plan.count
    query = np.searchsorted(query_row, np.stack([np.arange(plan.num_rows), np.arange(plan.num_rows) + 1]))
    size = config.page_tokens
    striped = SPECS[plan.layout].placement is PlacementKind.STRIPED
    out = []
    for pieces in cut_into_rounds([(int(r), int(length[r])) for r in rows], config.context_block):
        segments, begin = [], 0
        for row, first, end in pieces:
            query_begin, query_end = query[:, row].tolist()
            if query_begin < query_end and query_position[query_end - 1] >= first:
                queries = (first_query + query_begin, first_query + query_end)
                segments.append((*queries, begin, begin + end - first, first))
            begin += end - first
        row_of = np.concatenate([np.full(end - first, row) for row, first, end in pieces])
        position = np.concatenate([np.arange(first, end) for _, first, end in pieces])
        index = position // size
        holder = np.full(begin, rank)
        if shared:
            holder = (plan.home[row_of] + (index if striped else 0)) % config.num_ranks
        page = tables.all_pages[holder, plan.slot[row_of], index]
        assert (page >= 0).all(), "context lies in a page that its rank does not hold"
        out.append(
            Round(
                num_rows=begin,
                holder=holder.astype(np.int32),
                page=page,
                offset=(position % size).astype(np.int32),
                segments=np.array(segments, np.int32).reshape(-1, 5),
            )
        )
    return tuple(out)


def padded_round(rounds: tuple[Round, ...], num_rows: int, num_segments: int) -> Round:
    """The only round, or none, as one of num_rows rows and num_segments segments. Padding lies on no rank's page."""
    assert len(rounds) <= 1, len(rounds)
    out = Round(
        num_rows=num_rows,
        holder=np.full(num_rows, -1, np.int32),
        page=np.full(num_rows, NO_PAGE, np.int32),
        offset=np.zeros(num_rows, np.int32),
        segments=np.zeros((num_segments, 5), np.int32),
    )
    for part in rounds:
        for name in ("holder", "page", "offset", "segments"):
            values = getattr(part, name)
            getattr(out, name)[: len(values)] = values
    return out
