"""Prefill attention: context rows are gathered in rounds, up-projected, attended to, and merged by log-sum-exp.

n expanded tokens on this rank, H heads resident, C rows of a round, W = L + R.
"""

from __future__ import annotations

import torch

from splash_engines.lower_torch import TorchEngine
from splash_plugins.lse_merge.reference import lse_merge
from splash_plugins.mla_attention.reference import mla_prefill, sum_dtype
from splash_trt.dist.collectives import Collectives
from splash_trt.models.config import ModelConfig
from splash_trt.runtime.rounds import Round


class ExpandedAttention:
    """buffer [context_block_tokens, W] and workspace (flat) lie in the arena."""

    def __init__(
        self, model: ModelConfig, collectives: Collectives, buffer: torch.Tensor, workspace: torch.Tensor
    ) -> None:
        self._model = model
        self._comm = collectives
        self._buffer = buffer
        self._workspace = workspace

    def __call__(
        self,
        layer: int,
        engine: TorchEngine,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        q_position: torch.Tensor,
        rows: torch.Tensor,
        pages: torch.Tensor,
        rounds: tuple[Round, ...],
    ) -> torch.Tensor:
        """q_nope [n, H, nope], q_rope [n, H, R], q_position [n]; rows [T_r, W] of all of this rank's tokens, already
        stored where they belong; pages [num_pages, page_tokens, W] of this layer. Returns [n, H, v] in q's dtype."""
        n, heads = q_nope.shape[:2]
        dtype = sum_dtype(q_nope.dtype)
        out = torch.zeros((n, heads, self._model.v_head_dim), dtype=dtype, device=q_nope.device)
        lse = torch.full((n, heads), -torch.inf, dtype=dtype, device=q_nope.device)
        for part in rounds:
            context = self._rows(rows, pages, part)
            latents, k_rope = context.split([self._model.kv_lora_rank, self._model.qk_rope_head_dim], dim=-1)
            blocks = engine.expand_kv(layer, latents, self._workspace) if n else []
            for segment in part.segments:
                queries = slice(segment.query_begin, segment.query_end)
                keys = slice(segment.begin, segment.end)
                if segment.query_begin == segment.query_end or int(q_position[queries][-1]) < segment.first_key:
                    continue
                for first, k_nope, v in blocks:
                    head = slice(first, first + k_nope.shape[1])
                    new = mla_prefill(
                        q_nope[queries, head],
                        q_rope[queries, head],
                        q_position[queries],
                        k_nope[keys],
                        k_rope[keys],
                        v[keys],
                        segment.first_key,
                        scale=self._model.softmax_scale,
                    )
                    outs = torch.stack([out[queries, head], new[0]])
                    out[queries, head], lse[queries, head] = lse_merge(
                        outs, torch.stack([lse[queries, head], new[1]])
                    )
        return out.to(q_nope.dtype)

    def _rows(self, rows: torch.Tensor, pages: torch.Tensor, part: Round) -> torch.Tensor:
        """The round's context rows [C, W], in the buffer."""
        buffer = self._buffer[: part.num_rows]
        taken = pages[part.page, part.offset]
        if part.counts is not None:
            taken = self._comm.all_gather(taken, part.counts)
        buffer[part.place] = taken
        buffer[part.new_place] = rows[part.new_source]
        return buffer
