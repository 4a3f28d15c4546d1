"""Requests with controls, for a reference, and what a single rank makes of their logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from splash_trt.config import Layout
from splash_trt.plan import SAMPLE, SAMPLING_DTYPE, Plan, SlotControls, encode_controls
from splash_trt.request import Grammar, GrammarKind
from splash_trt.runtime.controls import Controls
from splash_trt.runtime.grammar import GrammarCompiler
from splash_trt.runtime.penalties import Share

END = 0
SLOTS = 16


def write_tokenizer(folder: Path, vocab_size: int, end: int = END) -> Path:
    """tokenizer.json of bytes, printable ones first, and one end-of-text token; vocab_size ids, of at most 257."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())[: vocab_size - 1]
    names.insert(end, "<end>")
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@dataclass
class Slot:
    """A request as the reference sees it: all its tokens, and what it asked for."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    penalties: tuple[float, float, float] | None = None
    bias: dict[int, float] = field(default_factory=dict)
    stops: tuple[int, ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None

    @property
    def controlled(self) -> bool:
        return bool(self.penalties or self.bias or self.min_tokens or self.grammar)

    def told(self, slot: int) -> SlotControls:
        return SlotControls(
            slot=slot,
            prompt=np.array(self.prompt, np.int32).tobytes(),
            output=np.array(self.output, np.int32).tobytes(),
            penalties=self.penalties,
            logit_bias=self.bias,
            stop_token_ids=self.stops,
            free_from=len(self.prompt) + self.min_tokens,
            grammar=self.grammar,
        )

    def adjusted(self, x: np.ndarray, tokenizer: LLTokenizer | None) -> np.ndarray:
        """In vLLM's order, id by id."""
        x, ends = x.copy(), {END, *self.stops}
        allowed = np.ones(len(x), np.bool_)
        if self.grammar is not None:
            assert tokenizer is not None and self.grammar.kind is GrammarKind.REGEX
            matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(self.grammar.text), log_level=0)
            assert matcher.consume_tokens(self.output)
            allowed[:] = False
            mask = np.frombuffer(matcher.compute_logit_bias(), np.uint8) > 0
            allowed[: len(mask)] = mask[: len(x)]
        without_ends = allowed.copy()
        without_ends[list(ends)] = False
        if len(self.output) < self.min_tokens and without_ends.any():
            allowed = without_ends
        x[~allowed] = -np.inf
        for token, value in self.bias.items():
            x[token] += value
        repetition, frequency, presence = self.penalties or (1.0, 0.0, 0.0)
        for token in {*self.prompt, *self.output}:
            x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        for token in set(self.output):
            x[token] -= frequency * self.output.count(token) + presence
        return x


def plan_of(slots: dict[int, Slot], opened: Sequence[int]) -> Plan:
    sampling = np.zeros(len(opened), SAMPLING_DTYPE)
    sampling["slot"] = opened
    empty = np.zeros(0, np.int32)
    controlled = sorted(slot for slot, state in slots.items() if state.controlled)
    return Plan(
        step=1,
        epoch=0,
        layout=Layout.TP,
        **dict.fromkeys(("slot", "start", "count", "home", "want_index"), empty),
        absorbed=empty.astype(np.bool_),
        token=empty.astype(np.int64),
        want_target=empty.astype(np.int64),
        counts=empty,
        sampling=sampling,
        controls=encode_controls([slots[slot].told(slot) for slot in opened if slots[slot].controlled]),
        controlled=np.array(controlled, np.int32),
    )


def adjust(state: Slot, x: np.ndarray, compiler: GrammarCompiler | str = "none") -> np.ndarray:
    """x [V] as a rank of its own makes it; where its output ends."""
    controls = Controls(Share(0, len(x)), SLOTS, (END,), compiler)
    controls.apply(plan_of({3: state}, [3]))
    position = np.array([len(state.prompt) + len(state.output)])
    adjustment = controls.adjustment(np.array([3]), position, np.array([SAMPLE]))
    assert adjustment is not None
    return adjustment(torch.from_numpy(x)[None])[0].numpy()
