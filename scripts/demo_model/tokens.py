"""The demo model's tokenizer: byte-level BPE with a chat template, saved as transformers reads it."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_model.text import Turn, Work

BOS, EOS, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BOS, EOS, USER, ASSISTANT)

# A user's message is a speaker's name, read in capitals; a system message has no meaning here and is left out.
# The end token comes first because in training every conversation follows the end of another. Without it the model
# takes the begin token, alone at position 0, for plain text, and does not stop after the speech.
CHAT_TEMPLATE = (
    "{{ eos_token + bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] | trim | upper }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] | trim + eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(works: list[Work], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` entries; any UTF-8 round-trips, since all 256 bytes are entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((work.text for work in works), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`; `context` is the longest input in tokens."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of one of SPECIAL_TOKENS."""
    found = tokenizer.token_to_id(token)
    assert found is not None, f"{token} is no entry of the tokenizer"
    return int(found)


def encode_works(tokenizer: Tokenizer, works: list[Work]) -> list[list[int]]:
    """Token ids of each work, between the begin and the end token."""
    bos, eos = special_id(tokenizer, BOS), special_id(tokenizer, EOS)
    return [[bos, *encoding.ids, eos] for encoding in tokenizer.encode_batch([work.text for work in works])]


def encode_conversations(tokenizer: Tokenizer, chats: list[list[Turn]]) -> list[list[int]]:
    """Token ids of each conversation, laid out as CHAT_TEMPLATE does."""
    texts = [BOS + "".join(f"{USER}{turn.speaker}{ASSISTANT}{turn.speech}{EOS}" for turn in turns) for turns in chats]
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]
