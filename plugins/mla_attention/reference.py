"""Latent attention (MLA), absorbed (decode, over paged rows) and expanded (prefill), in plain torch.

H heads on this rank, L latent, R rope part, W = L + R, n queries, C context rows. The softmax is taken in float32 or
wider. Both functions also return the log-sum-exp of the scores (natural logarithm), by which results over parts of a
context can be merged; a query that sees no row gets output 0 and log-sum-exp -inf.
"""

from __future__ import annotations

import torch

MAX_GATHERED = 1 << 25  # at most so many numbers are gathered from pages at a time, to bound temporary memory


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are taken in (the wide dtype): float32, or float64 if the inputs are float64."""
    return torch.promote_types(dtype, torch.float32)


def _softmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(probabilities, log-sum-exp) over the last axis; a row of -inf only gives 0 and -inf."""
    lse = torch.logsumexp(scores, dim=-1)
    shift = torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)
    return torch.exp(scores - shift[..., None]), lse


def mla_decode(
    q: torch.Tensor,
    pages: torch.Tensor,
    tables: torch.Tensor,
    length: torch.Tensor,
    *,
    latent: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of absorbed queries to latent rows.

    q [n, H, W]; pages [num_pages, page_tokens, W] of one layer; tables [n, P]: the pages that hold each query's
    context, in order (entries past its end are ignored); length [n]: rows of context that each query sees.
    Returns outputs [n, H, L] and log-sum-exp [n, H], both in the wide dtype.
    """
    n, heads, width = q.shape
    page_tokens = pages.shape[1]
    dtype = sum_dtype(q.dtype)
    out = torch.zeros((n, heads, latent), dtype=dtype, device=q.device)
    lse = torch.full((n, heads), -torch.inf, dtype=dtype, device=q.device)
    used = -(-int(length.max()) // page_tokens) if n else 0
    if used == 0:
        return out, lse
    position = torch.arange(used * page_tokens, device=q.device)
    step = max(1, MAX_GATHERED // (used * page_tokens * width))
    for begin in range(0, n, step):
        part = slice(begin, begin + step)
        taken = tables[part, :used].clamp(min=0)
        rows = pages.index_select(0, taken.flatten()).view(len(taken), -1, width).to(dtype)  # [m, C, W]
        shortest = int(length[part].min())  # every query sees every row before this one: no mask is needed there
        hidden = position[shortest:] >= length[part, None]  # [m, C - shortest]
        rows[:, shortest:].masked_fill_(hidden[..., None], 0)  # stale bytes may be NaN
        scores = torch.bmm(q[part].to(dtype), rows.transpose(1, 2)) * scale
        scores[..., shortest:].masked_fill_(hidden[:, None], -torch.inf)
        probability, lse[part] = _softmax(scores)
        out[part] = torch.bmm(probability, rows[..., :latent])
    return out, lse


def mla_prefill(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    q_position: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    v: torch.Tensor,
    first_key: int,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of one request's queries to one block of its up-projected context.

    q_nope [n, H, nope], q_rope [n, H, R], q_position [n] int64; k_nope [C, H, nope], k_rope [C, R] (shared by all
    heads), v [C, H, v_dim] at positions first_key, first_key + 1, …
    Returns outputs [n, H, v_dim] and log-sum-exp [n, H], both in the wide dtype.
    """
    dtype = sum_dtype(q_nope.dtype)
    key_position = first_key + torch.arange(k_nope.shape[0], device=q_nope.device)
    scores = torch.einsum("qhd,khd->hqk", q_nope.to(dtype), k_nope.to(dtype))
    scores += torch.einsum("qhd,kd->hqk", q_rope.to(dtype), k_rope.to(dtype))
    scores = (scores * scale).masked_fill_(key_position > q_position[:, None], -torch.inf)
    probability, lse = _softmax(scores)
    return torch.einsum("hqk,khd->qhd", probability, v.to(dtype)), lse.transpose(0, 1)
