"""The comparison with the oracle can fail: planted mistakes, one at a time, each of which it must find. They are in
what is known of a model, in its weights and in sampling; test_program_mutations.py has those in a step's program.

Every case first runs without the mistake and agrees. The mistakes of the second table change nothing that may be
observed, and the comparison must not object to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from splash_engines import ops
from splash_engines.kernels_reference import REFERENCE
from splash_trt.layout.partition import token_ranks
from splash_trt.models import families
from splash_trt.models.config import Experts, GroupScore, ModelConfig, Scoring
from splash_trt.request import SamplingParams
from splash_trt.runtime import noise
from splash_trt.weights import store
from splash_trt.weights.shards import Block, others_block
from tests.layouts.harness import Models, check_tokens, random_prompts, serve, worst_difference

ONE_GROUP = "v2_grouped with one group"
MARGIN = 1e-4  # four orders above what a right run may differ by
PAGE = 4

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """name: the model it shows on."""

    name: str
    layout: str
    ranks: int
    plant: Patch


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


apply_rope, rope_tables = ops.apply_rope, ops.rope_tables


def bias_in_the_weights(
    x: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor,
    config: Experts,
    num_tokens: torch.Tensor,
    choice: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    assert config.scoring is Scoring.SIGMOID
    REFERENCE.route(x, router, bias, config, num_tokens, choice, weight)
    biased = ((x @ router.t()).sigmoid() + bias).gather(1, choice.long())
    weight.copy_(biased / biased.sum(dim=-1, keepdim=True) * config.scale)


def unrotated_keys(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return x if x.dim() == 2 else apply_rope(x, cos, sin, interleaved)


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
row_keys, id_steps = noise.row_keys, noise.id_steps

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
        name="v3_base",
        layout="tp",
        ranks=2,
        plant=put(
            "splash_trt.runtime.cpu_runner.REFERENCE", dataclasses.replace(REFERENCE, route=bias_in_the_weights)
        ),
    ),
    "keys' rope part not rotated": Mistake(
        name="v3_base", layout="cp", ranks=2, plant=put("splash_engines.ops.apply_rope", unrotated_keys)
    ),
    "other ranks' output heads in another order": Mistake(
        name="v3_base", layout="dp", ranks=3, plant=put("splash_trt.weights.store.others_block", reordered_others(".o"))
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
        absorbed_tokens=1,
        dop_absorbed_tokens=1,
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

    monkeypatch.setattr("splash_trt.runtime.step_arrays.token_ranks", next_rank)
    monkeypatch.setattr("splash_trt.scheduler.rows.token_ranks", next_rank)
    with pytest.raises(AssertionError, match="does not hold"):
        check(models, Mistake(name="v3_base", layout="cp", ranks=2, plant=_nothing))
