"""The comparison with the oracle can fail: planted mistakes, one at a time, each of which it must find.

Every case first runs without the mistake and agrees. The mistakes of the second table change nothing that may be
observed, and the comparison must not object to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from splash_engines import ops
from splash_plugins.cache_append.reference import cache_append
from splash_plugins.dop_exchange.reference import to_heads
from splash_plugins.grouped_experts.reference import grouped_experts
from splash_plugins.lse_merge.reference import lse_merge
from splash_plugins.mla_attention.reference import mla_decode, mla_prefill
from splash_trt.layout.partition import token_ranks
from splash_trt.models import families
from splash_trt.models.config import Experts, GroupScore, ModelConfig, Scoring
from splash_trt.plan import Plan
from splash_trt.request import SamplingParams
from splash_trt.runtime import noise
from splash_trt.runtime.inputs import Context, InputBuilder, StepInputs
from splash_trt.weights import store
from splash_trt.weights.shards import Block, others_block
from tests.layouts.harness import Models, check_tokens, random_prompts, serve, worst_difference

ONE_GROUP = "v2_grouped with one group"
MARGIN = 1e-4  # four orders above what a right run may differ by
PAGE = 4

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """name: the model it shows on; absorb: chunks up to this long attend absorbed (1: decodes only)."""

    name: str
    layout: str
    ranks: int
    plant: Patch
    absorb: int = 1


def put(target: str, value: object) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(target, value)


def model(change: Callable[[ModelConfig], ModelConfig]) -> Patch:
    """The engine is told something else about the model than its checkpoint says."""
    return put("splash_trt.llm.load_config", lambda folder: change(families.load_config(folder)))


def rope(**changes: Any) -> Patch:
    return model(lambda config: dataclasses.replace(config, rope=dataclasses.replace(config.rope, **changes)))


def experts(**changes: Any) -> Patch:
    def change(config: ModelConfig) -> ModelConfig:
        assert config.experts is not None
        return dataclasses.replace(config, experts=dataclasses.replace(config.experts, **changes))

    return model(change)


def without_mscale(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, softmax_scale=config.qk_head_dim**-0.5)


def without_attention_factor(config: ModelConfig) -> ModelConfig:
    assert config.rope.yarn is not None
    yarn = dataclasses.replace(config.rope.yarn, attention_factor=1.0)
    return dataclasses.replace(config, rope=dataclasses.replace(config.rope, yarn=yarn))


def with_norm_eps_everywhere(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, latent_norm_eps=config.norm_eps)


apply_rope, gated_mlp, rope_tables, route = ops.apply_rope, ops.gated_mlp, ops.rope_tables, ops.route


def bias_in_the_weights(
    x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None, config: Experts
) -> tuple[torch.Tensor, torch.Tensor]:
    assert bias is not None and config.scoring is Scoring.SIGMOID
    choice, _ = route(x, router, bias, config)
    weight = ((x @ router.t()).sigmoid() + bias).gather(1, choice)
    return choice, weight / weight.sum(dim=-1, keepdim=True) * config.scale


def unrotated_keys(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return x if x.dim() == 2 else apply_rope(x, cos, sin, interleaved)


def up_before_gate(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return gated_mlp(x, gate_up.flip(0), down)


def up_before_gate_in_experts(
    x: torch.Tensor, choice: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, first: int
) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return grouped_experts(x, choice, weight, torch.cat([up, gate], dim=1), down, first)


def next_expert(*arguments: Any) -> torch.Tensor:
    x, choice, weight, gate_up, down, first_expert = arguments
    return grouped_experts(x, choice, weight, gate_up, down, first_expert + 1)


def shifted_mask(by: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def attend(q_nope: torch.Tensor, q_rope: torch.Tensor, position: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return mla_prefill(q_nope, q_rope, position + by, *rest, **options)

    return attend


def short_context(q: torch.Tensor, pages: torch.Tensor, tables: torch.Tensor, length: torch.Tensor, **o: Any) -> Any:
    return mla_decode(q, pages, tables, (length - 1).clamp(min=0), **o)


def plain_mean(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return lse_merge(outs, torch.where(lses.isinf(), lses, 0.0))


def swapped_shards(out: torch.Tensor, tokens_of: Any, heads: Sequence[int], collectives: Any) -> torch.Tensor:
    parts = list(out.split(list(heads), dim=1))
    parts[0], parts[1] = parts[1], parts[0]
    return to_heads(torch.cat(parts, dim=1), tokens_of, heads, collectives)


def reordered_others(only: str) -> Callable[..., Block]:
    """The other ranks' heads from the last rank to the first, in the tensors whose names end in `only`."""

    def block(*arguments: Any) -> Block:
        right = others_block(*arguments)
        shards = tuple(
            dataclasses.replace(s, parts=s.parts[::-1]) if s.spec.name.endswith(only) else s for s in right.shards
        )
        return dataclasses.replace(right, shards=shards)

    return block


def doubled_bias(source: Any, block: Block, tensors: dict[str, torch.Tensor]) -> None:
    read_weights(source, block, tensors)
    for name, tensor in tensors.items():
        if name.endswith(".o_bias"):
            tensor *= 2


read_weights = store._read
read_context = InputBuilder._context
build_inputs = InputBuilder.build


def next_stripe(self: InputBuilder, plan: Plan, *arguments: Any) -> Context:
    home = (plan.home + 1) % len(plan.counts)
    return read_context(self, dataclasses.replace(plan, home=home), *arguments)


def stacked_results(self: InputBuilder, plan: Plan) -> StepInputs:
    step = build_inputs(self, plan)
    return dataclasses.replace(step, want_order=torch.arange(len(step.want_order)))


def forgotten_row(pages: torch.Tensor, rows: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> None:
    """The last token's row is not stored."""
    cache_append(pages, rows[:-1], page[:-1], offset[:-1])


row_keys, id_steps = noise.row_keys, noise.id_steps
ENGINE, ABSORBED, EXPANDED = "splash_engines.lower_torch", "splash_trt.runtime.absorbed", "splash_trt.runtime.expanded"

FOUND: dict[str, Mistake] = {
    "rope style flipped": Mistake(name="v3_base", layout="tp", ranks=2, plant=rope(interleaved=False)),
    "half-split rope taken for interleaved": Mistake(
        name="v3_half_rope", layout="dp", ranks=2, plant=rope(interleaved=True)
    ),
    "yarn left out": Mistake(name="v3_flat_yarn", layout="cp", ranks=2, plant=rope(yarn=None)),
    "yarn's attention factor left out": Mistake(
        name="v3_flat_yarn", layout="dop", ranks=2, plant=model(without_attention_factor)
    ),
    "softmax scale without mscale squared": Mistake(
        name="v3_flat_yarn", layout="tp", ranks=2, plant=model(without_mscale)
    ),
    "latent norms with the model's epsilon": Mistake(
        name="v3_base", layout="dop", ranks=2, plant=model(with_norm_eps_everywhere)
    ),
    "output bias added by every rank": Mistake(
        name="v3_half_rope", layout="tp", ranks=2, plant=put("splash_trt.weights.store._read", doubled_bias)
    ),
    "a group scored by its best expert": Mistake(
        name="v3_base", layout="tp", ranks=2, plant=experts(group_score=GroupScore.MAX)
    ),
    "groups not limited": Mistake(name=ONE_GROUP, layout="dp", ranks=2, plant=experts(num_groups=1, top_groups=1)),
    "groups limited that are not": Mistake(name="v3_half_rope", layout="tp", ranks=2, plant=experts(num_groups=4)),
    "weights not normalised": Mistake(name="v3_base", layout="cp", ranks=2, plant=experts(normalize=False)),
    "weights normalised without being asked": Mistake(
        name="v3_half_rope", layout="tp", ranks=2, plant=experts(normalize=True)
    ),
    "routed scaling factor dropped": Mistake(name="v3_base", layout="dp", ranks=2, plant=experts(scale=1.0)),
    "correction bias in the weights": Mistake(
        name="v3_base", layout="tp", ranks=2, plant=put("splash_engines.ops.route", bias_in_the_weights)
    ),
    "gate and up swapped": Mistake(
        name="v3_base", layout="tp", ranks=2, plant=put("splash_engines.ops.gated_mlp", up_before_gate)
    ),
    "gate and up swapped in experts": Mistake(
        name="v3_base", layout="dp", ranks=2, plant=put(f"{ENGINE}.grouped_experts", up_before_gate_in_experts)
    ),
    "expert range off by one": Mistake(
        name="v3_base", layout="dop", ranks=3, plant=put(f"{ENGINE}.grouped_experts", next_expert)
    ),
    "keys' rope part not rotated": Mistake(
        name="v3_base", layout="cp", ranks=2, plant=put("splash_engines.ops.apply_rope", unrotated_keys)
    ),
    "causal mask lets the next token in": Mistake(
        name="v3_base", layout="tp", ranks=2, plant=put(f"{EXPANDED}.mla_prefill", shifted_mask(1))
    ),
    "causal mask hides the token itself": Mistake(
        name="v3_base", layout="cp", ranks=3, plant=put(f"{EXPANDED}.mla_prefill", shifted_mask(-1))
    ),
    "decode does not see its own row": Mistake(
        name="v3_base", layout="dp", ranks=2, plant=put(f"{ABSORBED}.mla_decode", short_context)
    ),
    "blocks merged without their weights": Mistake(
        name="v3_base", layout="tp", ranks=2, plant=put(f"{EXPANDED}.lse_merge", plain_mean)
    ),
    "stripes merged without their weights": Mistake(
        name="v3_base", layout="cp", ranks=2, plant=put(f"{ABSORBED}.lse_merge", plain_mean)
    ),
    "stripes read from the next rank on": Mistake(
        name="v3_base", layout="cp", ranks=3, plant=put("splash_trt.runtime.inputs.InputBuilder._context", next_stripe)
    ),
    "a decode's row not stored in its stripe": Mistake(
        name="v3_base", layout="cp", ranks=2, plant=put(f"{ABSORBED}.cache_append", forgotten_row)
    ),
    "a row not stored by its owner": Mistake(
        name="v3_base", layout="dop", ranks=2, plant=put("splash_trt.runtime.runner.cache_append", forgotten_row)
    ),
    "heads of two ranks swapped on the way back": Mistake(
        name="v3_base", layout="dop", ranks=2, plant=put(f"{ABSORBED}.to_heads", swapped_shards)
    ),
    "the same with short chunks": Mistake(
        name="v3_flat_yarn", layout="dop", ranks=4, plant=put(f"{ABSORBED}.to_heads", swapped_shards), absorb=4
    ),
    "other ranks' output heads in another order": Mistake(
        name="v3_base", layout="dp", ranks=3, plant=put("splash_trt.weights.store.others_block", reordered_others(".o"))
    ),
    "wanted rows left in stacked order": Mistake(
        name="v3_base", layout="dp", ranks=2, plant=put("splash_trt.runtime.inputs.InputBuilder.build", stacked_results)
    ),
    "noise without the position": Mistake(
        name="v3_base",
        layout="tp",
        ranks=2,
        plant=put("splash_trt.runtime.noise.row_keys", lambda seed, position: row_keys(seed, 0 * position)),
    ),
    "noise without the seed": Mistake(
        name="v3_base",
        layout="dp",
        ranks=2,
        plant=put("splash_trt.runtime.noise.row_keys", lambda seed, position: row_keys(0 * seed, position)),
    ),
    "noise by the place in the shard": Mistake(
        name="v3_base",
        layout="dop",
        ranks=2,
        plant=put("splash_trt.runtime.noise.id_steps", lambda first, count, device: id_steps(0, count, device)),
    ),
    "positions off by one for the noise": Mistake(
        name="v3_base",
        layout="cp",
        ranks=2,
        plant=put("splash_trt.runtime.noise.row_keys", lambda seed, position: row_keys(seed, position - 1)),
    ),
}

UNSEEN: dict[str, Mistake] = {
    "head order is local to a rank": Mistake(
        name="v3_base", layout="dp", ranks=3, plant=put("splash_trt.weights.store.others_block", reordered_others(""))
    ),
    "rotary positions are relative": Mistake(
        name="v3_base",
        layout="cp",
        ranks=2,
        plant=put("splash_engines.ops.rope_tables", lambda position, *rest: rope_tables(position + 5, *rest)),
    ),
}


def check(models: Models, mistake: Mistake) -> None:
    """Raises AssertionError, or whatever the run raises, unless the run agrees with the oracle in everything."""
    params = [
        SamplingParams(max_tokens=5, temperature=t, seed=7, ignore_eos=True, logprobs=0, prompt_logprobs=0)
        for t in (0.0, 1.5, 0.0, 1.0)
    ]
    (result,) = serve(
        models.folder(mistake.name),
        [(random_prompts((1, 2 * PAGE, 3 * PAGE + 1, PAGE - 1), seed=4), params)],
        ranks=mistake.ranks,
        layout=mistake.layout,
        page_tokens=PAGE,
        max_running=4,
        max_batch_tokens=11,
        context_block_tokens=6,
        absorbed_tokens=mistake.absorb,
        dop_absorbed_tokens=mistake.absorb,
    )
    worst = worst_difference(models, mistake.name, result.completions)
    assert worst < MARGIN, f"log-probabilities differ by {worst:.1e}"
    assert worst < 1e-8, f"differs by {worst:.1e}, which is neither right nor clearly wrong"
    for completion, p in zip(result.completions, params, strict=True):
        check_tokens(models, mistake.name, completion, p)


@pytest.fixture(scope="module")
def clean(models: Models) -> Callable[[Mistake], None]:
    """Checks a case's run without its mistake, once for all cases that share it."""
    models.derive(ONE_GROUP, "v2_grouped", topk_group=1)
    done = set()

    def check_clean(mistake: Mistake) -> None:
        key = dataclasses.replace(mistake, plant=_nothing)
        if key not in done:
            check(models, key)
            done.add(key)

    return check_clean


def _nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pass


@pytest.mark.parametrize("what", list(FOUND))
def test_planted_mistake_is_found(
    models: Models, clean: Callable[[Mistake], None], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    clean(FOUND[what])
    FOUND[what].plant(monkeypatch)
    with pytest.raises(AssertionError) as found:
        check(models, FOUND[what])
    assert "neither right" not in str(found.value)


@pytest.mark.parametrize("what", list(UNSEEN))
def test_what_may_not_matter_does_not(models: Models, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    UNSEEN[what].plant(monkeypatch)
    check(models, UNSEEN[what])


def test_a_token_on_the_wrong_rank_is_found(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """CP's tokens dealt out from the next rank: their rows belong to pages that these ranks do not hold."""

    def next_rank(*arguments: Any, num_ranks: int, **options: Any) -> Any:
        right = token_ranks(*arguments, num_ranks=num_ranks, **options)
        return None if right is None else ((right + 1) % num_ranks).astype(right.dtype)

    monkeypatch.setattr("splash_trt.runtime.inputs.token_ranks", next_rank)
    monkeypatch.setattr("splash_trt.scheduler.rows.token_ranks", next_rank)
    with pytest.raises(AssertionError, match="does not hold"):
        check(models, Mistake(name="v3_base", layout="cp", ranks=2, plant=_nothing))
