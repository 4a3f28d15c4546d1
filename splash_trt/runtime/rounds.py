"""Expanded attention's walk over contexts: which rows of which requests are up-projected together, and where they are.

A round is at most context_block_tokens rows, of one request or several. All ranks make the same rounds where rows
have to be gathered (CP, DOP); elsewhere each rank makes only its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import SPECS, PlacementKind, Tokens
from splash_trt.plan import Plan
from splash_trt.runtime.context_rounds import cut_into_rounds


@dataclass(frozen=True)
class Segment:
    """One request's part of a round: rows at positions first_key … are buffer[begin:end]; its queries on this rank
    are expanded tokens [query_begin, query_end)."""

    first_key: int
    begin: int
    end: int
    query_begin: int
    query_end: int


@dataclass(frozen=True, kw_only=True)
class Round:
    """num_rows rows of context, assembled into a buffer.

    page, offset [n] int64: the rows this rank takes from its own pages. counts: rows that each rank contributes to
    the gathering, None where there is none. place [sum n] int64: buffer positions of the rows taken or gathered.
    new_source, new_place [m] int64: rows of this very step, taken from the hidden states of this rank.
    """

    num_rows: int
    segments: tuple[Segment, ...]
    page: torch.Tensor
    offset: torch.Tensor
    counts: tuple[int, ...] | None
    place: torch.Tensor
    new_source: torch.Tensor
    new_place: torch.Tensor


def context_rounds(
    plan: Plan, config: EngineConfig, rank: int, pages: np.ndarray, expanded: np.ndarray, local: np.ndarray
) -> tuple[Round, ...]:
    """The rounds of one rank.

    pages [slots, P]: this rank's block tables; expanded [n]: tokens (in plan order) of expanded rows whose hidden
    state is here; local [T]: index of each token among this rank's hidden states, -1 elsewhere.
    """
    spec = SPECS[plan.layout]
    rows = np.flatnonzero(~plan.absorbed)
    if plan.layout is Layout.DP:
        rows = rows[plan.home[rows] == rank]
    length = plan.start + plan.count
    gathers = plan.layout in (Layout.CP, Layout.DOP) and config.num_ranks > 1
    own_new = spec.tokens is Tokens.EVERYWHERE and gathers  # DOP: the chunk's own rows are at hand
    first_token = np.cumsum(plan.count) - plan.count
    query = np.searchsorted(expanded, np.stack([first_token, first_token + plan.count]))
    out = []
    for pieces in cut_into_rounds([(int(r), int(length[r])) for r in rows], config.context_block):
        segments, begin = [], 0
        for row, first, end in pieces:
            segments.append(Segment(first, begin, begin + end - first, int(query[0, row]), int(query[1, row])))
            begin += end - first
        row_of = np.concatenate([np.full(end - first, row) for row, first, end in pieces])
        position = np.concatenate([np.arange(first, end) for _, first, end in pieces])
        new = position >= plan.start[row_of] if own_new else np.zeros(begin, np.bool_)
        token = first_token[row_of] + position - plan.start[row_of]
        old = np.flatnonzero(~new)
        page_index = position[old] // config.page_tokens
        holder = np.full(len(old), rank)
        if gathers:
            shift = page_index if spec.placement is PlacementKind.STRIPED else 0
            holder = (plan.home[row_of[old]] + shift) % config.num_ranks
        mine = np.flatnonzero(holder == rank)
        taken = pages[plan.slot[row_of[old[mine]]], page_index[mine]]
        assert (taken >= 0).all(), "context lies in a page that this rank does not hold"
        out.append(
            Round(
                num_rows=begin,
                segments=tuple(segments),
                page=index_tensor(taken),
                offset=index_tensor(position[old[mine]] % config.page_tokens),
                counts=tuple(np.bincount(holder, minlength=config.num_ranks).tolist()) if gathers else None,
                place=index_tensor(old[np.argsort(holder, kind="stable")]),
                new_source=index_tensor(local[token[new]]),
                new_place=index_tensor(np.flatnonzero(new)),
            )
        )
    return tuple(out)


def index_tensor(array: np.ndarray) -> torch.Tensor:
    """int64, as torch wants its indices."""
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
