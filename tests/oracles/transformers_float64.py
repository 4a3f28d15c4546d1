"""transformers' models computed in true float64: the oracle of the model tests.

transformers keeps islands of float32 in a float64 model (norms, router, softmax, rope), which cost it 1e-6 to 1e-5 in a
log-probability. `Float64Lift` lifts them, `OnlyFloat64` proves for every operation of every forward that none is left.
README.md beside this file lists the traps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import AutoConfig, AutoModelForCausalLM

_LIFTED = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class Float64Lift(TorchFunctionMode):
    """Reads `torch.float32` as `torch.float64` and `Tensor.float` as `Tensor.double` in every torch call.

    The same effect as replacing `torch` in the modelling module by a proxy, but it reaches helpers in other modules
    (rope initialisation), holds for this thread alone and leaves nothing to restore.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        lifted_args = [self._lift(value) for value in args]
        return func(*lifted_args, **{key: self._lift(value) for key, value in (kwargs or {}).items()})

    @staticmethod
    def _lift(value: Any) -> Any:
        return _LIFTED.get(value, value) if isinstance(value, torch.dtype) else value


class OnlyFloat64(TorchDispatchMode):
    """Raises AssertionError at the first operation that reads or makes a floating tensor other than float64."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operations = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_flatten((args, kwargs, result))[0]:
            if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
                assert value.dtype in (torch.float64, torch.complex128), f"{func} touches {value.dtype}"
        self.num_operations += 1
        return result


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' model of the folder, eager attention and experts, with all parameters in `dtype`."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    # deepseek_v3 sizes its rope by a head_dim of config.json, where one contradicts the rope part, and breaks.
    config.head_dim = config.qk_rope_head_dim
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
    )
    return model.eval().to(dtype)


class Oracle:
    """The model of a Hugging Face folder in float64 on the CPU. Every forward runs under the guard."""

    def __init__(self, folder: Path | str) -> None:
        # Loaded under the lift too: inverse frequencies made in float32 would stay rounded, and no guard can see that.
        with torch.no_grad(), Float64Lift():
            self._model = load_model(Path(folder), torch.float64)
        self.config = self._model.config
        self.num_guarded_operations = 0

    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of the next token after each position: [len(ids), vocab], float64, natural logarithm."""
        return torch.log_softmax(self.logits(ids), dim=-1)

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """The same before they are normalised."""
        with torch.no_grad(), Float64Lift(), OnlyFloat64() as guard:
            result = self._model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
        assert result.dtype == torch.float64
        self.num_guarded_operations += guard.num_operations
        return result

    def greedy(self, ids: Sequence[int], n: int) -> list[int]:
        """The `n` most likely next tokens, one after another; end-of-sequence ids do not stop it.

        Each token comes from a full forward: no cache whose own mistakes the tests would inherit.
        """
        tokens = list(ids)
        for _ in range(n):
            tokens.append(int(self.logprobs(tokens)[-1].argmax()))
        return tokens[len(ids) :]

    def token_gaps(self, ids: Sequence[int]) -> torch.Tensor:
        """Log-probability of the best next token less that of the second, at each position: [len(ids)], float64."""
        best = self.logprobs(ids).topk(2, dim=-1).values
        return best[:, 0] - best[:, 1]

    def router_gaps(self, ids: Sequence[int]) -> torch.Tensor:
        """How near to another choice of experts each position's result is: [len(ids)], float64.

        Entry t is the smallest margin, over all MoE layers and all positions up to t (which t attends to), between the
        last expert taken and the first left out, or the last group taken and the first left out, in units of the score
        that the router sorts by. Below the error of an arithmetic, its result at t may differ by any amount.
        """
        margins: list[torch.Tensor] = []
        hooks = [
            module.register_forward_hook(lambda gate, _, output: margins.append(choice_margins(gate, output[0])))
            for name, module in self._model.named_modules()
            if name.endswith(".mlp.gate")
        ]
        try:
            self.logprobs(ids)
        finally:
            for hook in hooks:
                hook.remove()
        if not margins:
            return torch.full((len(ids),), torch.inf, dtype=torch.float64)
        return torch.stack(margins).amin(dim=0).cummin(dim=0).values

    def router_gap(self, ids: Sequence[int]) -> float:
        """The smallest of `router_gaps`: over all layers and positions."""
        return float(self.router_gaps(ids)[-1])

    def rope(self) -> tuple[torch.Tensor, float, float]:
        """Inverse frequencies [qk_rope_head_dim / 2] in float64, the factor on cos and sin, and the softmax scale."""
        rotary = self._model.model.rotary_emb
        return rotary.inv_freq, float(rotary.attention_scaling), float(self._model.model.layers[0].self_attn.scaling)


def choice_margins(gate: Any, router_logits: torch.Tensor) -> torch.Tensor:
    """Margin of one router's choices: [T, E] logits to [T], of experts and, where groups are limited, of groups.

    The scores are those that the class sorts by: softmax and a group's best in deepseek_v2, else sigmoid + correction
    bias and the sum of a group's best two.
    """
    correction = getattr(gate, "e_score_correction_bias", None)
    if correction is None:
        scores, num_best = router_logits.softmax(dim=-1), 1
        num_groups = gate.num_group if gate.topk_method == "group_limited_greedy" else 1
    else:
        scores, num_best, num_groups = router_logits.sigmoid() + correction, 2, gate.num_group
    margins = [torch.full_like(scores[:, 0], torch.inf)]
    if num_groups > 1 and gate.topk_group < num_groups:
        grouped = scores.unflatten(-1, (num_groups, -1))  # [T, groups, experts of a group]
        best = grouped.topk(num_best, dim=-1).values.sum(dim=-1)
        ranked = best.sort(dim=-1, descending=True)
        margins.append(ranked.values[:, gate.topk_group - 1] - ranked.values[:, gate.topk_group])
        left_out = ranked.indices[:, gate.topk_group :].unsqueeze(-1).expand(-1, -1, grouped.shape[-1])
        scores = grouped.scatter(1, left_out, -torch.inf).flatten(1)
    if gate.top_k < scores.shape[-1]:
        ranked_scores = scores.sort(dim=-1, descending=True).values
        margins.append(ranked_scores[:, gate.top_k - 1] - ranked_scores[:, gate.top_k])
    return torch.stack(margins).amin(dim=0)
