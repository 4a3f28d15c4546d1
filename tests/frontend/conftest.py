from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from splash_trt.frontend.tokenizer import Tokenizer
from tests.frontend.fake_engine import FakeEngine, ready_message
from tests.frontend.servers import FrontendProcess, start_frontend, wait_until_ready

TEXT = ["The quick brown fox jumps over the lazy dog, and then the dog jumps over the fox again."] * 4
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]  # <|end|> is the fake engine's EOS


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


def make_tokenizer(folder: Path, template: str, special: Sequence[str] = (), added: Sequence[str] = ()) -> Path:
    """A byte-level vocabulary that knows little more than bytes, and a chat template.

    special, added: tokens beside the usual ones, those that have no text by themselves and others.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(list(added))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|end|>", "chat_template": "unused"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(tokenizer_folder)


@pytest.fixture
def address() -> Iterator[str]:
    # Not below tmp_path, which can be too long for a socket.
    with tempfile.TemporaryDirectory(prefix="splash-") as folder:
        yield f"ipc://{folder}/link"


@pytest.fixture(scope="session")
def shared() -> Iterator[tuple[FakeEngine, str]]:
    """One engine for all tests that do it no harm."""
    with tempfile.TemporaryDirectory(prefix="splash-") as folder:
        engine = FakeEngine(f"ipc://{folder}/link", ready_message(400))
        engine.start()
        yield engine, f"ipc://{folder}/link"
        engine.stop()


@pytest.fixture
def engine(shared: tuple[FakeEngine, str]) -> FakeEngine:
    return shared[0]


@pytest.fixture(scope="session")
def server(shared: tuple[FakeEngine, str], tokenizer_folder: Path) -> Iterator[FrontendProcess]:
    """One frontend for all tests that do it no harm."""
    flags = ("--tokenizer", str(tokenizer_folder), "--keep-engine", "--ready-deadline", "0.5")
    frontend = start_frontend(shared[1], *flags, "--max-queued", "150")
    yield wait_until_ready(frontend)
    frontend.end()
