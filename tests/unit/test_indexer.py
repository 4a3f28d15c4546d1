"""Models with an indexer: tensors as transformers has them, readable for planning, refused wherever they would run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers.models.deepseek_v32 import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.models.glm_moe_dsa import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from splash_engines.build import build_engine
from splash_trt.commands.group import commands
from splash_trt.config import Formats
from splash_trt.llm import LLM
from splash_trt.models.families import load_config
from splash_trt.weights.checkpoint import Checkpoint
from splash_trt.weights.dummy import DummyWeights
from splash_trt.weights.hf_forms import form_of
from splash_trt.weights.spec import Cut, TensorSpec, tensor_specs

CLASSES: dict[str, tuple[Any, Any]] = {
    "deepseek_v32": (DeepseekV32Config, DeepseekV32ForCausalLM),
    "glm_moe_dsa": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "index_n_heads": 3,
    "index_head_dim": 40,
    "index_topk": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


@pytest.fixture(scope="module", params=sorted(CLASSES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp(request.param)
    config, model = CLASSES[request.param]
    torch.manual_seed(7)
    made = model(config(**SIZES))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    made.save_pretrained(path)
    return path


def whole(source: Checkpoint | DummyWeights, spec: TensorSpec) -> torch.Tensor:
    out = torch.full(spec.shape, torch.nan)
    source.read(spec, 0, spec.shape[spec.axis], out)
    return out


def test_the_tensors_are_those_of_transformers(folder: Path) -> None:
    """Opening the files holds every name and shape against them; the values come from the right ones."""
    model = load_config(folder)
    checkpoint = Checkpoint(folder, model)
    indexer = CLASSES[model.model_type][1].from_pretrained(folder).model.layers[1].self_attn.indexer
    specs = {spec.name: spec for spec in tensor_specs(model)}
    expected = {
        "index_q": indexer.wq_b.weight.view(3, 40, 48),
        "index_k": indexer.wk.weight,
        "index_k_norm": indexer.k_norm.weight,
        "index_k_norm_bias": indexer.k_norm.bias,
        "index_weights": indexer.weights_proj.weight,
    }
    assert {n.split(".", 2)[2] for n in specs if ".1.index" in n} == set(expected)
    for name, tensor in expected.items():
        spec = specs[f"layers.1.{name}"]
        assert spec.cut is Cut.NONE, "every rank chooses rows for itself"
        assert torch.equal(whole(checkpoint, spec), tensor.detach()), name


def test_every_number_of_the_checkpoint_is_counted_once(folder: Path) -> None:
    model = load_config(folder)
    ours = sum(torch.Size(spec.shape).numel() for spec in tensor_specs(model))
    theirs = CLASSES[model.model_type][1].from_pretrained(folder)
    buffers = sum(b.numel() for name, b in theirs.named_buffers() if name.endswith("e_score_correction_bias"))
    assert ours == sum(p.numel() for p in theirs.parameters()) + buffers
    names = {name for spec in tensor_specs(model) for name in form_of(spec, model, ()).shapes()}
    assert {name for name in names if "indexer" in name} == {n for n in theirs.state_dict() if "indexer" in n}


def test_random_weights_have_neutral_norms(folder: Path) -> None:
    model = load_config(folder)
    specs = {spec.name: spec for spec in tensor_specs(model)}
    source = DummyWeights(model, 3)
    assert torch.all(whole(source, specs["layers.0.index_k_norm"]) == 1)
    assert torch.all(whole(source, specs["layers.0.index_k_norm_bias"]) == 0)


def test_running_it_is_refused_in_one_sentence_everywhere(folder: Path, tmp_path: Path) -> None:
    model_type = load_config(folder).model_type
    message = f"model_type: '{model_type}' attends to the cache rows that an indexer chooses; only `splash-trt capa"
    with pytest.raises(ValueError, match=message):
        build_engine(folder, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()
    for options in ({}, {"dummy_weights": 1}):
        with pytest.raises(ValueError, match=message):
            LLM(folder, **options)
    for arguments in (
        ["build", "--model", str(folder), "--out", str(tmp_path / "engine")],
        ["serve", "--model", str(folder), "--dummy-weights", "1", "--ranks", "2"],
    ):
        result = CliRunner().invoke(commands, arguments)
        assert result.exit_code != 0 and message in result.output, result.output


def test_numbers_stored_otherwise_are_refused_where_they_would_run() -> None:
    folder = Path(__file__).resolve().parents[2] / "models" / "splash-tiny"
    dtype = load_config(folder).dtype
    for field in ("weights", "attention", "cache"):
        with pytest.raises(ValueError, match=f"formats: {field} as fp8 while the engine's dtype is {dtype}; only"):
            LLM(folder, dummy_weights=1, formats=Formats(**{field: "fp8"}))
