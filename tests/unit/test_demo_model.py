"""The demo model in models/splash-tiny: what it is, what it answers, and the script that trains it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

from splash_trt import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "models" / "splash-tiny"
CONTINUATIONS = ROOT / "tests" / "data" / "splash_tiny_continuations.json"
MAX_BYTES = 12 * 2**20
MAX_SPEECH_TOKENS = 200

sys.path.insert(0, str(ROOT / "scripts"))
text_module = importlib.import_module("demo_model.text")
baselines = importlib.import_module("demo_model.baselines")
network = importlib.import_module("demo_model.network")
fetch = importlib.import_module("fetch_demo_text")


@pytest.fixture(scope="module")
def model() -> DeepseekV3ForCausalLM:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


TOKENIZER: Any = AutoTokenizer.from_pretrained(FOLDER)


class TestFolder:
    def test_class_and_shape(self, model: DeepseekV3ForCausalLM) -> None:
        config = model.config
        assert isinstance(model, DeepseekV3ForCausalLM) and isinstance(config, DeepseekV3Config)
        assert config.num_attention_heads == 8 and 6 <= config.num_hidden_layers <= 8
        assert config.q_lora_rank and config.kv_lora_rank and config.qk_rope_head_dim
        assert config.first_k_dense_replace == 1 and config.n_routed_experts >= 8 and config.n_shared_experts == 1
        assert config.max_position_embeddings == 4096

    def test_size(self, model: DeepseekV3ForCausalLM) -> None:
        assert 5_000_000 <= sum(weight.numel() for weight in model.parameters()) <= 6_000_000
        assert (FOLDER / "model.safetensors").stat().st_size <= MAX_BYTES

    def test_bfloat16_and_published_names(self) -> None:
        with safe_open(FOLDER / "model.safetensors", framework="pt") as file:
            dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}
        biases = {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(1, 8)}
        assert {name for name, dtype in dtypes.items() if dtype != "BF16"} == biases
        assert all(dtypes[name] == "F32" for name in biases)
        assert "model.layers.1.mlp.experts.15.down_proj.weight" in dtypes

    def test_bias_balances_and_decides(self, model: DeepseekV3ForCausalLM) -> None:
        for layer in model.model.layers[1:]:
            bias = layer.mlp.gate.e_score_correction_bias
            assert bias.abs().max() > 0.01 and len(bias.unique()) > 8
        ids = torch.tensor([TOKENIZER("And the king said unto the people, Go ye up.")["input_ids"]])
        with torch.no_grad():
            before = model(ids).logits
            kept = [layer.mlp.gate.e_score_correction_bias.clone() for layer in model.model.layers[1:]]
            for layer in model.model.layers[1:]:
                layer.mlp.gate.e_score_correction_bias.zero_()
            after = model(ids).logits
            for layer, bias in zip(model.model.layers[1:], kept, strict=True):
                layer.mlp.gate.e_score_correction_bias.copy_(bias)
        assert (before - after).abs().max() > 0.1

    def test_reported_numbers(self) -> None:
        report = json.loads((FOLDER / "training.json").read_text())
        assert report["held_out_bits_per_byte"] < min(report["baselines_bits_per_byte"].values()) - 0.3
        assert report["minutes"] <= 10
        assert report["held_out_bits_per_byte"] == pytest.approx(min(row[2] for row in report["curve"]), abs=5e-3)


class TestTokenizer:
    @settings(max_examples=200, deadline=None)
    @given(st.text(max_size=200))
    @example("  two  spaces \r\n\ttab , . 'tis n't")
    @example("<|end|><|begin|>é漢字🎭\x00")
    def test_any_text_comes_back(self, text: str) -> None:
        ids = TOKENIZER(text)["input_ids"]
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == text

    def test_all_bytes_are_entries(self) -> None:
        assert 1000 <= len(TOKENIZER) <= 4096
        assert TOKENIZER.unk_token is None and TOKENIZER.eos_token == "<|end|>"

    def test_chat_template(self) -> None:
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": " Hamlet\n"},
            {"role": "assistant", "content": "Words, words, words."},
            {"role": "user", "content": "polonius"},
        ]
        prompt = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert prompt == (
            "<|end|><|begin|><|user|>HAMLET<|assistant|>Words, words, words.<|end|><|user|>POLONIUS<|assistant|>"
        )
        ids = TOKENIZER(prompt)["input_ids"]
        assert ids[:3] == TOKENIZER.convert_tokens_to_ids(["<|end|>", "<|begin|>", "<|user|>"])


class TestAnswers:
    def test_greedy_continuations(self, model: DeepseekV3ForCausalLM) -> None:
        """The ids were recorded by scripts/record_demo_model.py when the model was made."""
        records = json.loads(CONTINUATIONS.read_text(encoding="utf-8"))
        assert len(records) == 20
        for record in records:
            ids = torch.tensor([record["prompt_ids"]])
            assert TOKENIZER(record["prompt"])["input_ids"] == record["prompt_ids"]
            num_new = len(record["continuation_ids"])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False)
            assert out[0, ids.shape[1] :].tolist() == record["continuation_ids"], record["prompt"]

    @pytest.mark.parametrize(("ranks", "layout"), [(1, "tp"), (3, "tp"), (2, "dp"), (2, "cp"), (4, "dop")])
    def test_greedy_continuations_in_every_layout(self, ranks: int, layout: str) -> None:
        """The same ids from our own engine; the recorded margins between first and second are above 0.001."""
        records = json.loads(CONTINUATIONS.read_text(encoding="utf-8"))
        prompts = [record["prompt_ids"] for record in records]
        sampling = [
            SamplingParams(max_tokens=len(record["continuation_ids"]), temperature=0, ignore_eos=True)
            for record in records
        ]
        with LLM(FOLDER, ranks=ranks, layout=layout, dtype="float32", memory_bytes=128 << 20) as llm:
            outputs = llm.generate(prompts, sampling)
        for record, output in zip(records, outputs, strict=True):
            assert list(output.tokens) == record["continuation_ids"], record["prompt"]

    @pytest.mark.parametrize("speaker", ["Hamlet", "Juliet", "Falstaff", "Portia"])
    def test_chat_turn_stops(self, model: DeepseekV3ForCausalLM, speaker: str) -> None:
        inputs = TOKENIZER.apply_chat_template(
            [{"role": "user", "content": speaker}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**inputs, max_new_tokens=MAX_SPEECH_TOKENS, do_sample=False)
        speech = out[0, inputs["input_ids"].shape[1] :].tolist()
        assert speech[-1] == TOKENIZER.eos_token_id and len(speech) < MAX_SPEECH_TOKENS
        assert not set(speech[:-1]) & set(TOKENIZER.all_special_ids)
        assert len(TOKENIZER.decode(speech[:-1]).split()) >= 3

    def test_knows_english_from_noise(self, model: DeepseekV3ForCausalLM) -> None:
        text = "And the servant went out unto his master, and told him all the words of the king."
        words = text.split()
        losses = []
        for order in (words, words[::-1]):
            ids = torch.tensor([TOKENIZER(" ".join(order))["input_ids"]])
            with torch.no_grad():
                losses.append(float(model(ids, labels=ids).loss))
        assert losses[0] < 3.5 and losses[1] > losses[0] + 1


class TestTraining:
    def test_dense_experts_compute_what_transformers_does(self, model: DeepseekV3ForCausalLM) -> None:
        trainee = network.Trainee(model.config, 0.0).eval()
        trainee.model.load_state_dict(model.state_dict())
        ids = torch.randint(4, model.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            losses = trainee.token_losses(ids)
            logits = model(ids[:, :-1]).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        torch.testing.assert_close(losses.flatten(), expected, atol=1e-4, rtol=1e-4)

    def test_a_few_steps_on_a_cpu(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        words = ["king", "queen", "crown", "sword", "night", "morrow", "falls", "rises", "speaks", "weeps"]
        for name in ("one.modern", "two.modern", "three.modern"):
            speeches = [
                f"{'FIRST' if i % 2 else 'SECOND'} LORD.\n" + "The " + " ".join(rng.choice(words, 25)) + "."
                for i in range(120)
            ]
            (tmp_path / f"{name}.txt").write_text("A PLAY\n\n" + "\n\n".join(speeches) + "\n", encoding="utf-8")
        command = [sys.executable, "scripts/train_demo_model.py", "--text", *map(str, sorted(tmp_path.glob("*.txt")))]
        command += ["--out", str(tmp_path / "out"), "--held-out", "two", "--steps", "8", "--eval-every", "4"]
        command += ["--batch-tokens", "256", "--short", "32", "--context", "64", "--vocab-size", "300", "--layers", "2"]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=200
        )
        assert done.returncode == 0, done.stderr
        report = json.loads((tmp_path / "out" / "training.json").read_text())
        assert set(report["held_out"]) == {"two.modern"}
        assert report["curve"][-1][2] < report["curve"][0][2]
        assert len(report["baselines_bits_per_byte"]) == 3
        small = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        assert any(layer.mlp.gate.e_score_correction_bias.any() for layer in small.model.layers[1:])
        assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
        assert (tmp_path / "out" / "loss.png").stat().st_size > 1000


class TestText:
    def test_a_work_is_held_out_in_all_editions(self) -> None:
        works = [
            text_module.Work(title=name.split(".")[0], name=name, text="x")
            for name in ("tempest.folio", "tempest.modern", "hamlet.modern")
        ]
        train, held_out = text_module.split_by_work(works, ("tempest",))
        assert [work.name for work in train] == ["hamlet.modern"]
        assert [work.name for work in held_out] == ["tempest.folio", "tempest.modern"]
        with pytest.raises(ValueError, match="macbeth"):
            text_module.split_by_work(works, ("macbeth",))

    def test_speeches(self) -> None:
        play = "A PLAY\n\n\nPERSONS.\n\nHarald, a king.\n\nACT I.\n\nHar.\nStay! [Aside.] Who comes\nhere?\n\n"
        play += "[Enter a Lord.]\n\n" + "SECOND LORD.\nI, my liege.\n\n" * 100
        turns = text_module.play_turns(text_module.Work(title="play", name="play.modern", text=play))
        assert (turns[0].speaker, turns[0].speech) == ("HARALD", "Stay!  Who comes\nhere?")
        assert (turns[1].speaker, turns[1].speech, len(turns)) == ("SECOND LORD", "I, my liege.", 101)

    def test_verses_become_books(self) -> None:
        books = fetch.kjv_works("Ge1:1 In the beginning\nGe1:2 And the earth\nGe2:1 Thus\n1Sm1:1 Now there was")
        assert books == {
            "genesis": "GENESIS\n\nChapter 1\n\nIn the beginning\nAnd the earth\n\nChapter 2\n\nThus\n",
            "1_samuel": "1 SAMUEL\n\nChapter 1\n\nNow there was\n",
        }


class TestBaselines:
    def test_kneser_ney_is_a_distribution(self) -> None:
        rng = np.random.default_rng(1)
        model = baselines.KneserNey([rng.choice(list(b"abcdef "), 5000).astype(np.uint8).tobytes() for _ in range(2)])
        for context in (b"abcd", b"fe a", b"zzzz", b"zzza"):
            first = int.from_bytes(context, "big") * 256
            assert model.probability(first + np.arange(256)).sum() == pytest.approx(1.0)

    def test_kneser_ney_counts_contexts_not_occurrences(self) -> None:
        """`b` is frequent but follows `a` alone; `c` is rarer but follows many: after unseen bytes `c` is likelier."""
        text = b"ab" * 500 + b"".join(bytes([first]) + b"c" for first in b"defghijklmnop" * 5)
        model = baselines.KneserNey([text])
        after_unseen = int.from_bytes(b"ZZZZ", "big") * 256
        assert model.probability(np.array([after_unseen + ord("c")])) > 3 * model.probability(
            np.array([after_unseen + ord("b")])
        )

    def test_a_repeated_text_costs_little(self) -> None:
        rng = np.random.default_rng(2)
        text = rng.choice(list(b"abcdefgh"), 4000).astype(np.uint8).tobytes()
        alone, after = baselines.xz_bits_per_byte([text], [text])
        assert alone > 2.9 and after < 0.2
        # Eight bytes at random carry three bits each; no model can do better on text that it has not seen.
        other = rng.choice(list(b"abcdefgh"), 4000).astype(np.uint8).tobytes()
        assert 2.95 < baselines.KneserNey([text]).bits_per_byte([other]) < 4.5
