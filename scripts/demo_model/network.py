"""The demo model: transformers' deepseek_v3, with a training forward that is fast at this size.

Shapes: B sequences of L tokens, T = B·L, H hidden size, E routed experts, I expert width.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE


def demo_config(*, vocab_size: int, context: int, bos: int, eos: int, layers: int) -> DeepseekV3Config:
    """The demo model's shape; 8 layers and a vocabulary of 2,048 make 5.9 million parameters."""
    return DeepseekV3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_mtp_layers=0,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_routed_experts=16,
        n_shared_experts=1,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rope_interleave=True,
        initializer_range=0.04,
        tie_word_embeddings=False,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=None,
    )


class DenseMoE(DeepseekV3MoE):
    """The same function as transformers' module, all experts for all tokens in two matrix products.

    At 16 experts of width 32 that is faster than sorting tokens. `load` counts the tokens each expert was chosen for.
    """

    load: torch.Tensor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map [B, L, H] to [B, L, H]."""
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        with torch.autocast(flat.device.type, enabled=False):
            _, weights, chosen = self.gate(flat.float())
        spread = torch.zeros(flat.shape[0], self.gate.num_experts, device=flat.device, dtype=weights.dtype)
        spread = spread.scatter(1, chosen, weights)
        if self.training:
            self.load += (spread.detach() > 0).sum(dim=0)
        experts = self.experts
        gate_up = F.linear(flat, experts.gate_up_proj.flatten(0, 1)).unflatten(1, (self.gate.num_experts, -1))
        gate, up = gate_up.chunk(2, dim=-1)
        inner = F.silu(gate) * up * spread.unsqueeze(-1).to(gate.dtype)
        down = experts.down_proj.transpose(0, 1).flatten(1)
        out = F.linear(inner.flatten(1), down).view_as(hidden_states)
        return out + self.shared_experts(hidden_states)


class Trainee(nn.Module):
    """The model in training: residual dropout, dense experts, and expert loads for the balance bias."""

    def __init__(self, config: DeepseekV3Config, dropout: float) -> None:
        super().__init__()
        self.model = DeepseekV3ForCausalLM(config)
        self.dropout = dropout
        self.moes: list[DenseMoE] = []
        for layer in self.model.model.layers:
            # Every layer adds two terms to the residual stream: start them small, as GPT-2 does.
            shrink = (2 * config.num_hidden_layers) ** -0.5
            last = [layer.self_attn.o_proj.weight]
            if isinstance(layer.mlp, DeepseekV3MoE):
                layer.mlp.__class__ = DenseMoE
                layer.mlp.register_buffer("load", torch.zeros(config.n_routed_experts), persistent=False)
                self.moes.append(cast(DenseMoE, layer.mlp))
                last += [layer.mlp.experts.down_proj, layer.mlp.shared_experts.down_proj.weight]
            else:
                last.append(layer.mlp.down_proj.weight)
            for weight in last:
                weight.data.mul_(shrink)
            for part in (layer.self_attn.o_proj, layer.mlp):
                part.register_forward_hook(self._drop)

    def _drop(self, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return F.dropout(output, self.dropout, training=module.training)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean negative log-likelihood in nats of ids[:, 1:] given what stands before; ids is [B, L + 1]."""
        return self.token_losses(ids).mean()

    def token_losses(self, ids: torch.Tensor) -> torch.Tensor:
        """Negative log-likelihoods in nats, [B, L]."""
        body = self.model.model
        inputs = ids[:, :-1]
        hidden = body.embed_tokens(inputs)
        hidden = F.dropout(hidden, self.dropout, training=self.training)
        positions = torch.arange(inputs.shape[1], device=ids.device).unsqueeze(0)
        rope = body.rotary_emb(hidden, positions)
        for layer in body.layers:
            # Without a mask and with a causal module, the attention function is causal by itself.
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rope)
        logits = self.model.lm_head(body.norm(hidden))
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(inputs)

    @torch.no_grad()
    def balance(self, rate: float) -> torch.Tensor:
        """Move each expert's correction bias by `rate` towards even load, and clear the counts.

        Auxiliary-loss-free balancing (DeepSeek-V3 technical report, section 2.1.2). Returns the largest load over
        the mean load, averaged over the layers, as a scalar on the device.
        """
        worst = []
        for moe in self.moes:
            mean = moe.load.mean()
            moe.gate.e_score_correction_bias.add_(rate * torch.sign(mean - moe.load))
            worst.append(moe.load.max() / mean)
            moe.load.zero_()
        return torch.stack(worst).mean()
