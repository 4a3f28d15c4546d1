"""The table of kernels in plain torch, for any dtype and device: the reference that every other kernel is tested
against."""

from __future__ import annotations

import torch.nn.functional as F

from splash_engines.kernels import Kernels
from splash_plugins.absorb.reference import absorb
from splash_plugins.cache_append.reference import append_rows, gather_rows
from splash_plugins.embed.reference import embed
from splash_plugins.few_rows.reference import gated, linear, linear_parts
from splash_plugins.grouped_experts.reference import sum_of_experts
from splash_plugins.latent_rows.reference import latent_rows
from splash_plugins.mla_attention.decode_reference import decode
from splash_plugins.mla_attention.prefill_reference import prefill
from splash_plugins.norm.reference import add_norm
from splash_plugins.rope_q.reference import rope_q
from splash_plugins.router.reference import choose, route
from splash_plugins.value_up.reference import decode_values, value_up

REFERENCE = Kernels(
    embed=embed,
    add_norm=add_norm,
    project_in=F.linear,
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
    grouped_experts=sum_of_experts,
    linear=linear,
    linear_parts=linear_parts,
    gated=gated,
)
