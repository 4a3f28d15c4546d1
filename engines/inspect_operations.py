"""What `splash-trt inspect --ops` tells: each operation, its candidates, which one is used on this machine, and why."""

from __future__ import annotations

import textwrap

import torch

from splash_engines.choose import choose_kernels
from splash_engines.kernels import Kernels
from splash_engines.operations import BLOCK, DSV3_A_OUT, DSV3_EXPERTS, DSV3_HIDDEN, TOP_K, Here, operations
from splash_engines.operations_program import program_operations, program_sizes
from splash_engines.operations_step import step_operations
from splash_engines.registry import Choice, Dims, Registry
from splash_trt.models.config import Experts, GroupScore, ModelConfig, Scoring

CONTEXT = 8192  # cache rows that the indexer chooses from
WIDTH = 120
ONLY = "the reference itself, and the only one here"
ROWS = (1, 2, 4, 8, 16, 32)  # rows of the program's steps

# The model that TensorRT-LLM's operators were written for, with the experts of one of 64 ranks.
DEEPSEEK_V3_2: dict[str, Dims] = {
    "add_norm": {"hidden": DSV3_HIDDEN},
    "silu_mul": {"inner": 2048},
    "grouped_experts": {"hidden": DSV3_HIDDEN, "inner": 2048, "experts": 4, "top_k": 8},
    "mla_attention": {"heads": 128, "latent": 512, "rope": 64, "context": 1024},
    "lse_merge": {"parts": 2, "heads": 128, "latent": 512},
    "router_product": {"hidden": DSV3_HIDDEN, "experts": DSV3_EXPERTS},
    "fused_a": {"hidden": DSV3_HIDDEN, "out": DSV3_A_OUT},
    "indexer_topk": {"context": CONTEXT, "k": TOP_K},
    "fp8_quantize": {"inner": DSV3_HIDDEN},
    "fp8_product": {"inner": DSV3_HIDDEN, "out": 4096},
}
DEEPSEEK_EXPERTS = Experts(
    num_experts=DSV3_EXPERTS,
    top_k=8,
    intermediate_size=2048,
    shared_intermediate_size=2048,
    scoring=Scoring.SIGMOID,
    selection_bias=True,
    num_groups=8,
    top_groups=4,
    group_score=GroupScore.TOP2_SUM,
    normalize=True,
    scale=2.5,
)


def sizes_of(model: ModelConfig) -> dict[str, Dims]:
    """Each operation's sizes in this model; operations that it does not have are left out."""
    hidden, latent, program = model.hidden_size, model.kv_lora_rank, program_sizes(model)
    sizes: dict[str, Dims] = {
        "add_norm": {"hidden": hidden},
        "silu_mul": {"inner": model.intermediate_size},
        "mla_attention": {"heads": model.num_heads, "latent": latent, "rope": model.qk_rope_head_dim, "context": 1024},
        "lse_merge": {"parts": 2, "heads": model.num_heads, "latent": latent},
    }
    if model.experts is not None:
        experts = model.experts
        sizes["grouped_experts"] = {
            "hidden": hidden,
            "inner": experts.intermediate_size,
            "experts": -(-experts.num_experts // 2),
            "top_k": experts.top_k,
        }
        sizes["router_product"] = program["route"]
    sizes["fused_a"] = program["project_in"]
    if model.indexer is not None:
        sizes["indexer_topk"] = {"context": CONTEXT, "k": model.indexer.top_k}
    wide = 2 * model.intermediate_size
    if hidden % BLOCK == 0 and wide % BLOCK == 0:
        sizes["fp8_quantize"] = {"inner": hidden}
        sizes["fp8_product"] = {"inner": hidden, "out": wide}
    return sizes


def format_operations(
    found: Here, kernels: Kernels, sizes: dict[str, Dims], experts: Experts | None, tokens: int
) -> str:
    """Decides each operation for `tokens` tokens in bfloat16 on this machine's device; returns text that tells the
    choices and which kernels a GPU's program uses. kernels: our own for that device. experts: the model's."""
    device = torch.device("cuda" if found.gpu is not None else "cpu")
    name = found.gpu.name if found.gpu is not None else "a CPU"
    trtllm = found.trtllm
    lines = [
        f"{tokens} tokens, bfloat16, on {name}",
        f"TensorRT-LLM's operators: {trtllm.package or 'none'}",
        *(line for reason in trtllm.reasons for line in _wrapped(reason, "  ")),
    ]
    registry = Registry((*step_operations(found), *operations(found)), device)
    for operation in registry.operations.values():
        dims = sizes.get(operation.name)
        if dims is None:
            lines += ["", f"{operation.name}: not in this model, or not at its sizes"]
            continue
        choice = registry.choose(operation.name, {"tokens": tokens, **dims}, torch.bfloat16)
        shown = ", ".join(f"{key} {value:,}" for key, value in dims.items())
        lines += ["", f"{operation.name} ({shown}): {operation.meaning}", *_candidates(choice)]
    return "\n".join([*lines, "", *_program(found, kernels, sizes, experts, device)])


def _program(
    found: Here, kernels: Kernels, sizes: dict[str, Dims], experts: Experts | None, device: torch.device
) -> list[str]:
    registry = Registry(program_operations(found, kernels, experts), device)
    named = {"project_in": "fused_a", "route": "router_product"}
    of_program = {name: sizes[named[name]] for name in registry.operations}
    _, told = choose_kernels(kernels, registry, of_program, torch.bfloat16, ROWS)
    lines = [f"the program of a GPU (steps of {ROWS[0]} to {ROWS[-1]} tokens)"]
    for used in told:
        took = "" if used.microseconds is None else f"{used.microseconds} µs, "
        lines += _wrapped(took + used.why, f"  {used.operation:<10}  {used.rows:<5}  {used.candidate}  ")
    return lines


def _candidates(choice: Choice) -> list[str]:
    width = max(len(f.candidate) for f in choice.findings)
    lines = []
    for finding in choice.findings:
        took = "" if finding.microseconds is None else f"{finding.microseconds:,.1f} µs"
        told = ", ".join(part for part in (took, finding.reason) if part) or ONLY
        head = f"  {finding.candidate:<{width}}  {finding.verdict.value:<6}  "
        lines += _wrapped(told, head)
    return lines


def _wrapped(text: str, head: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head)) or [head.rstrip()]
