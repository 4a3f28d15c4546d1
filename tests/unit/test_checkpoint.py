"""Checkpoints: every rank's parts are the file's tensors, and a folder that does not fit is refused by name."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from splash_trt.models.config import LayerKind, ModelConfig
from splash_trt.models.families import load_config
from splash_trt.weights.checkpoint import Checkpoint
from splash_trt.weights.spec import Cut, TensorSpec, partition, tensor_specs
from tests.oracles.tiny_models import VARIANTS, make_model

Tensors = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def all_tensors(folder: Path) -> Tensors:
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def by_hand(model: ModelConfig, files: Tensors) -> Tensors:
    """The engine's tensors from the file's, head by head and expert by expert."""
    n, r, v = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    found = {"embed": files["model.embed_tokens.weight"], "final_norm": files["model.norm.weight"]}
    if not model.tied_embeddings:
        found["head"] = files["lm_head.weight"]
    for layer, kind in enumerate(model.layers):
        hf, our = f"model.layers.{layer}.", f"layers.{layer}."
        attn = hf + "self_attn."
        found[our + "attn_norm"] = files[hf + "input_layernorm.weight"]
        found[our + "mlp_norm"] = files[hf + "post_attention_layernorm.weight"]
        q_name = "q_proj" if model.q_lora_rank is None else "q_b_proj"
        q, kv, o = (files[f"{attn}{name}.weight"] for name in (q_name, "kv_b_proj", "o_proj"))
        heads = range(model.num_heads)
        found[our + "q_b"] = torch.stack([q[h * (n + r) : (h + 1) * (n + r)] for h in heads])
        found[our + "w_uk"] = torch.stack([kv[h * (n + v) : h * (n + v) + n] for h in heads])
        found[our + "w_uv"] = torch.stack([kv[h * (n + v) + n : (h + 1) * (n + v)] for h in heads])
        found[our + "o"] = torch.stack([o.t()[h * v : (h + 1) * v] for h in heads])
        same = {"kv_a": "kv_a_proj_with_mqa.weight", "kv_a_norm": "kv_a_layernorm.weight"}
        if model.q_lora_rank is not None:
            same |= {"q_a": "q_a_proj.weight", "q_a_norm": "q_a_layernorm.weight"}
        if model.attention_bias:
            same |= {"kv_a_bias": "kv_a_proj_with_mqa.bias", "o_bias": "o_proj.bias"}
            if model.q_lora_rank is not None:
                same["q_a_bias"] = "q_a_proj.bias"
        found |= {our + key: files[attn + name] for key, name in same.items()}
        if kind is LayerKind.DENSE:
            found |= gated(our, hf + "mlp.", files)
            continue
        assert model.experts is not None
        found[our + "router"] = files[hf + "mlp.gate.weight"]
        if model.experts.selection_bias:
            found[our + "router_bias"] = files[hf + "mlp.gate.e_score_correction_bias"]
        found |= gated(our + "shared.", hf + "mlp.shared_experts.", files)
        each = [f"{hf}mlp.experts.{e}." for e in range(model.experts.num_experts)]
        found[our + "experts.gate_up"] = torch.stack(
            [torch.cat([files[e + "gate_proj.weight"], files[e + "up_proj.weight"]]) for e in each]
        )
        found[our + "experts.down"] = torch.stack([files[e + "down_proj.weight"] for e in each])
    return found


def gated(our: str, hf: str, files: Tensors) -> Tensors:
    return {
        our + "gate_up": torch.stack([files[hf + "gate_proj.weight"], files[hf + "up_proj.weight"]]),
        our + "down": files[hf + "down_proj.weight"],
    }


def read(
    source: Checkpoint, spec: TensorSpec, begin: int, end: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    shape = (*spec.shape[: spec.axis], end - begin, *spec.shape[spec.axis + 1 :])
    out = torch.full(shape, torch.nan, dtype=dtype)
    source.read(spec, begin, end, out)
    return out


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of a single-file checkpoint."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)


def opened(folder: Path) -> Checkpoint:
    return Checkpoint(folder, load_config(folder))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_parts_of_all_ranks_make_the_file(name: str, shards: int, tmp_path: Path) -> None:
    folder = make_model(name, tmp_path, shards=shards)
    source = opened(folder)
    expected = by_hand(source.model, all_tensors(folder))
    specs = tensor_specs(source.model)
    assert {spec.name for spec in specs} == set(expected)
    for spec in (*specs, *tensor_specs(source.model, "inside")):
        whole = expected[spec.name]
        assert whole.shape == spec.shape
        for num_ranks in (1, 2, 3, 4):
            ranges = partition(spec.shape[spec.axis], num_ranks)
            parts = [read(source, spec, begin, end) for begin, end in ranges]
            assert torch.equal(torch.cat(parts, dim=spec.axis), whole), (spec.name, num_ranks)


def test_values_are_converted_to_the_dtype_asked_for(tmp_path: Path) -> None:
    folder = make_model("v3_half_rope", tmp_path)
    source = opened(folder)
    expected = by_hand(source.model, all_tensors(folder))
    for spec in tensor_specs(source.model):
        size = spec.shape[spec.axis]
        for dtype in (torch.float64, torch.bfloat16):
            assert torch.equal(read(source, spec, 0, size, dtype), expected[spec.name].to(dtype))


def test_mixed_dtypes_in_the_file(tmp_path: Path) -> None:
    folder = make_model("v3_base", tmp_path)

    def mix(tensors: Tensors) -> None:
        for name in tensors:
            if not name.endswith("e_score_correction_bias"):
                tensors[name] = tensors[name].to(torch.bfloat16)

    rewrite(folder, mix)
    source = opened(folder)
    expected = by_hand(source.model, all_tensors(folder))
    for spec in tensor_specs(source.model):
        assert torch.equal(read(source, spec, 0, spec.shape[spec.axis]), expected[spec.name].float())


@pytest.mark.parametrize("fused", [("gate_up",), ("down",), ("gate_up", "down")])
def test_experts_in_one_tensor(fused: tuple[str, ...], tmp_path: Path) -> None:
    folder = make_model("glm_base", tmp_path)
    expected = by_hand(load_config(folder), all_tensors(folder))

    def fuse(tensors: Tensors) -> None:
        for layer in (1, 2):
            prefix = f"model.layers.{layer}.mlp.experts."
            for part in fused:
                words = ("down_proj",) if part == "down" else ("gate_proj", "up_proj")
                for name in [name for name in tensors if name.startswith(prefix) and name.split(".")[-2] in words]:
                    del tensors[name]
                tensors[f"{prefix}{part}_proj"] = expected[f"layers.{layer}.experts.{part}"]

    rewrite(folder, fuse)
    source = opened(folder)
    for spec in (*tensor_specs(source.model), *tensor_specs(source.model, "inside")):
        if ".experts." in spec.name:
            parts = [read(source, spec, begin, end) for begin, end in partition(spec.shape[spec.axis], 3)]
            assert torch.equal(torch.cat(parts, dim=spec.axis), expected[spec.name])


def test_only_what_the_rows_need_is_mapped(tmp_path: Path) -> None:
    """A rank's heads of a large tensor must not bring the whole tensor into memory."""
    folder = make_model("v3_base", tmp_path)
    source = opened(folder)
    asked: list[tuple[str, int]] = []

    class Counting:
        def __init__(self, name: str) -> None:
            self.name, self.slice = name, source._files[name].get_slice(name)

        def __getitem__(self, index: object) -> torch.Tensor:
            part = self.slice[index]
            asked.append((self.name, part.numel()))
            return part

    source._slice = Counting  # type: ignore[method-assign, assignment]
    model = source.model
    sizes = {"q_b": 24 + 16, "w_uk": 24 + 20, "w_uv": 24 + 20, "o": 20}
    for spec in tensor_specs(model):
        name = spec.name.removeprefix("layers.1.")
        if name in sizes:
            asked.clear()
            read(source, spec, 1, 2)
            other = spec.shape[2]
            assert [count for _, count in asked] == [sizes[name] * other]
        if name == "experts.gate_up":
            asked.clear()
            read(source, spec, 3, 5)
            assert {hf.split(".")[5] for hf, _ in asked} == {"3", "4"}
    for spec in tensor_specs(model, "inside"):
        if spec.cut is Cut.INSIDE_EXPERTS:
            asked.clear()
            read(source, spec, 3, 5)
            assert [count for _, count in asked] == [2 * model.hidden_size] * 8, "rows of gates, or columns"


def test_rows_of_no_one_are_read_as_nothing(tmp_path: Path) -> None:
    source = opened(make_model("v2_greedy", tmp_path))
    for spec in tensor_specs(source.model):
        read(source, spec, 0, 0)


def test_skipped_tensors(tmp_path: Path) -> None:
    folder = make_model("v3_tied", tmp_path)

    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
        tensors["model.layers.61.embed_tokens.weight"] = torch.zeros(1)

    rewrite(folder, add)
    assert "head" not in {spec.name for spec in tensor_specs(opened(folder).model)}


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.self_attn.kv_b_proj.weight",
        "model.layers.2.mlp.gate.e_score_correction_bias",
        "model.layers.2.mlp.experts.5.down_proj.weight",
    ],
)
def test_missing_or_misshapen_tensor_is_named(name: str, tmp_path: Path) -> None:
    folder = make_model("v3_base", tmp_path)
    shape = list(load_file(folder / "model.safetensors")[name].shape)
    wrong = [shape[0] + 1, *shape[1:]]

    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(wrong)}))
    with pytest.raises(ValueError) as caught:
        opened(folder)
    assert name in str(caught.value) and str(shape) in str(caught.value) and str(wrong) in str(caught.value)

    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match="lacks ") as caught:
        opened(folder)
    assert name in str(caught.value) and str(shape) in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate.weight",  # a dense layer
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_a_proj.bias",
        "model.layers.1.self_attn.indexer.wk.weight",
        "model.layers.1.mlp.experts.8.up_proj.weight",
        "model.layers.1.mlp.experts.0.up_proj.weight_scale_inv",
        "model.extra.weight",
        "vision.weight",
    ],
)
def test_unexpected_tensor_is_named(name: str, tmp_path: Path) -> None:
    folder = make_model("v3_base", tmp_path)
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(2)}))
    with pytest.raises(ValueError, match="holds .*which a deepseek_v3 model") as caught:
        opened(folder)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "word"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.bool, "BOOL")]
)
def test_tensor_that_is_not_floating_point_is_named(dtype: torch.dtype, word: str, tmp_path: Path) -> None:
    folder = make_model("v3_base", tmp_path)
    name = "model.layers.1.self_attn.o_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(ValueError, match=f"{name} is stored as {word}; supported are F64, F32, F16, BF16"):
        opened(folder)


@pytest.mark.parametrize("keep", [0, 5, 4000, -1])
@pytest.mark.parametrize("shards", [1, 2])
def test_file_cut_short_is_named(shards: int, keep: int, tmp_path: Path) -> None:
    folder = make_model("v2_greedy", tmp_path, shards=shards)
    path = sorted(folder.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"{path.name}: is damaged, cut short or no safetensors file"):
        opened(folder)


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_pickle_is_refused_and_never_run(name: str, tmp_path: Path) -> None:
    folder, sprung = make_model("v2_greedy", tmp_path / "model"), tmp_path / "sprung"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(sprung)))
    message = "no safetensors file" if name == "model.safetensors" else f"{name}: pickles .* are never read"
    with pytest.raises(ValueError, match=message):
        opened(folder)
    assert not sprung.exists()


def test_folder_without_weights(tmp_path: Path) -> None:
    folder = make_model("v2_greedy", tmp_path)
    model = load_config(folder)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(ValueError, match=f"neither model.safetensors nor {INDEX}"):
        Checkpoint(folder, model)
    with pytest.raises(ValueError, match="absent: is not a folder"):
        Checkpoint(folder / "absent", model)


@pytest.mark.parametrize(
    "file_name",
    ["../model-00001-of-00002.safetensors", "/model.safetensors", "a/../../b.safetensors", "..\\b.safetensors"],
)
def test_index_cannot_lead_out_of_the_folder(file_name: str, tmp_path: Path) -> None:
    folder = make_model("v2_greedy", tmp_path / "model", shards=2)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(
        (folder / "model-00001-of-00002.safetensors").read_bytes()
    )
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = file_name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="weight_map.*model.norm.weight.*leads out of the model's folder"):
        opened(folder)


@pytest.mark.parametrize("weight_map", [None, [], {}, {"model.norm.weight": 3}, {"model.norm.weight": "model.bin"}])
def test_index_of_another_form(weight_map: object, tmp_path: Path) -> None:
    folder = make_model("v2_greedy", tmp_path, shards=2)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=f"{INDEX}: weight_map"):
        opened(folder)


def test_index_that_disagrees_with_its_files(tmp_path: Path) -> None:
    folder = make_model("v2_greedy", tmp_path, shards=2)
    first, second = sorted(path.name for path in folder.glob("*.safetensors"))
    original = json.loads((folder / INDEX).read_text())
    name = next(key for key, file in original["weight_map"].items() if file == first)

    def written(**changes: str | None) -> None:
        weight_map = {**original["weight_map"], **changes}
        kept = {key: file for key, file in weight_map.items() if file is not None}
        (folder / INDEX).write_text(json.dumps({"weight_map": kept}))

    written(**{name: second})
    with pytest.raises(ValueError, match=f"{second}: lacks {name}"):
        opened(folder)
    written(**{name: None})
    with pytest.raises(ValueError, match=f"{first}: holds {name}, which {INDEX} does not place there"):
        opened(folder)
    written()
    opened(folder)
    (folder / second).unlink()
    with pytest.raises(ValueError, match=f"names {second}, not there"):
        opened(folder)


def test_files_that_are_links_out_of_the_folder(tmp_path: Path) -> None:
    """As in the cache of a hub's client."""
    folder = make_model("v2_greedy", tmp_path / "model", shards=2)
    for path in folder.glob("*.safetensors"):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    assert opened(folder).model.model_type == "deepseek_v2"
