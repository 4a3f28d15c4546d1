"""Expanded (prefill) attention by kernels in torch (cuDNN's or FlashAttention 2), with one or two calls for each run.

These kernels need the head dim in one piece and queries at consecutive positions, and align the causal mask with the
first key. So the shared rope part is copied into the keys, segments are cut into runs of consecutive positions, and a
run that continues a context takes one call without and one with a mask, whose results are merged by log-sum-exp. cuDNN
plans anew for every new shape, which takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from splash_plugins.lse_merge.reference import lse_merge


@dataclass(frozen=True)
class Run:
    """Queries [query_begin, query_end) at positions first_position, first_position + 1, … against a segment's keys."""

    query_begin: int
    query_end: int
    key_begin: int
    key_end: int
    first_key: int
    first_position: int

    def pieces(self) -> Iterator[tuple[slice, slice, bool]]:
        """The calls, as (queries, keys, causal): keys that all queries see; then keys of which query i sees those up to
        the i-th."""
        hidden = min(max(self.first_key - self.first_position, 0), self.query_end - self.query_begin)
        queries = slice(self.query_begin + hidden, self.query_end)
        num_queries = self.query_end - queries.start
        shared = min(max(self.first_position - self.first_key, 0), self.key_end - self.key_begin)
        own_begin = self.key_begin + shared
        own_end = min(self.key_end, own_begin + num_queries)
        if num_queries and shared:
            yield queries, slice(self.key_begin, own_begin), False
        if own_end > own_begin:
            yield queries, slice(own_begin, own_end), True


def runs_of(segments: np.ndarray, position: np.ndarray) -> list[Run]:
    """Cuts segments [S, 5], as in prefill_kernel.prefill, into runs, where positions [E] have a gap."""
    runs = []
    for begin, end, key_begin, key_end, first_key in segments.tolist():
        gaps = begin + 1 + np.flatnonzero(np.diff(position[begin:end]) != 1)
        edges = [begin, *gaps.tolist(), end] if end > begin else []
        for first, last in zip(edges, edges[1:], strict=False):
            runs.append(Run(first, last, key_begin, key_end, first_key, int(position[first])))
    return runs


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, h, d], k [m, h, d], v [m, h, vd]: outputs [n, h, vd] and log-sum-exp [n, h] of one piece."""
    if backend == "cudnn":
        heads_first = [t.transpose(0, 1)[None] for t in (q, k, v)]
        result = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *heads_first, None, True, 0.0, causal, False, scale=scale
        )
        return result[0][0].transpose(0, 1), result[1].reshape(q.shape[1], q.shape[0]).T
    # FlashAttention 2 aligns the mask with the last key instead, which makes no difference in square pieces.
    assert not causal or len(q) == len(k), "fewer own keys than queries"
    result = torch.ops.aten._flash_attention_forward(
        q[None], k[None], v[None], None, None, len(q), len(k), 0.0, causal, False, scale=scale
    )
    return result[0][0], result[1].reshape(q.shape[1], -1)[:, : len(q)].T


def prefill(
    q: torch.Tensor,
    position: torch.Tensor,
    rows: torch.Tensor,
    k_nope: torch.Tensor,
    v: torch.Tensor,
    segments: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    merge: bool,
    *,
    runs: Sequence[Run],
    backend: str = "cudnn",
) -> None:
    """As prefill_kernel.prefill, but uses `runs` from runs_of instead of position, segments and tiles. So a captured
    CUDA graph cannot be replayed for other runs. backend: "cudnn" or "flash".
    """
    heads, nope = k_nope.shape[1:]
    rope = rows[:, rows.shape[1] - (q.shape[2] - nope) :]
    k = torch.cat([k_nope, rope[:, None].expand(-1, heads, -1)], dim=-1)
    for run in runs:
        queries = slice(run.query_begin, run.query_end)
        pieces = list(run.pieces())
        whole = len(pieces) == 1 and pieces[0][0] == queries
        if not merge and not whole:
            out[queries] = 0
            if lse is not None:
                lse[queries] = -torch.inf
        so_far: tuple[torch.Tensor, torch.Tensor] | None = None
        for part, keys, causal in pieces:
            new = _attend(q[part], k[keys], v[keys], causal, scale, backend)
            if so_far is None and merge:
                assert lse is not None
                so_far = out[part], lse[part]
            so_far = new if so_far is None else _merge(so_far, new)
        if so_far is not None:
            out[pieces[0][0]] = so_far[0].to(out.dtype)
            if lse is not None:
                lse[pieces[0][0]] = so_far[1]


def _merge(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    return lse_merge(torch.stack([one[0].float(), other[0].float()]), torch.stack([one[1], other[1]]))
