"""The table of kernels for a GPU: Triton's, which exist for float32 and narrower types."""

from __future__ import annotations

import torch

from splash_engines.kernels import Kernels
from splash_plugins.absorb.kernel import absorb
from splash_plugins.cache_append.kernel import append_rows
from splash_plugins.embed.kernel import embed
from splash_plugins.few_rows.kernel import gated, linear
from splash_plugins.few_rows.parts_kernel import linear_parts
from splash_plugins.grouped_experts.kernel import grouped_experts
from splash_plugins.latent_rows.kernel import latent_rows
from splash_plugins.mla_attention.decode_kernel import decode
from splash_plugins.mla_attention.gather_kernel import gather_rows
from splash_plugins.mla_attention.prefill_best import prefill
from splash_plugins.norm.kernel import add_norm
from splash_plugins.rope_q.kernel import rope_q
from splash_plugins.router.kernel import choose, route
from splash_plugins.value_up.kernel import decode_values, value_up


def project_in(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = x.new_empty((len(x), len(w)))
    linear(x, w, out)
    return out


CUDA = Kernels(
    embed=embed,
    add_norm=add_norm,
    project_in=project_in,
    latent_rows=latent_rows,
    rope_q=rope_q,
    absorb=absorb,
    append=append_rows,
    decode=decode,
    decode_values=decode_values,
    value_up=value_up,
    gather=gather_rows,
    prefill=prefill,
    route=route,
    choose=choose,
    grouped_experts=grouped_experts,
    linear=linear,
    linear_parts=linear_parts,
    gated=gated,
)
