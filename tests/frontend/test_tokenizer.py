"""Ids to text one token at a time, against the tokenizers package; chat templates, harmless and hostile ones."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from splash_trt.frontend.chat_template import ChatTemplate
from splash_trt.frontend.errors import ApiError
from splash_trt.frontend.tokenizer import ByteDetokenizer, Detokenizer, Tokenizer, WindowDetokenizer

RUNS = settings(
    deadline=None, derandomize=True, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
DEMO_MODEL = Path(__file__).resolve().parents[2] / "models" / "splash-tiny"
USER = [{"role": "user", "content": "Hello"}]


def encode_chat(tokenizer: Tokenizer, messages: list[dict[str, str]], limit: int | None = None) -> list[int]:
    return tokenizer.encode_chat(tokenizer.chat_template.render(messages), limit)


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@RUNS
@given(st.lists(st.integers(0, 330), max_size=20))
def test_any_ids(tokenizer_folder: Path, tokenizer: Tokenizer, ids: list[int]) -> None:
    """Ids that no text has: stray bytes, special tokens, ids without a token."""
    reference = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    assert "".join(pieces(tokenizer.detokenizer(), ids)) == reference.decode(ids, skip_special_tokens=True)


@RUNS
@given(st.text(max_size=12))
def test_any_text(tokenizer: Tokenizer, text: str) -> None:
    got = pieces(tokenizer.detokenizer(), tokenizer.encode(text))
    assert "".join(got) == text
    assert sum(piece.count("\ufffd") for piece in got) == text.count("\ufffd")
    window = pieces(WindowDetokenizer(tokenizer._decode), tokenizer.encode(text))
    assert "".join(window) == text


@RUNS
@given(st.binary(max_size=24), st.lists(st.integers(0, 24), max_size=8), st.text(max_size=8))
def test_bytes_however_cut(noise: bytes, places: list[int], text: str) -> None:
    """Tokens of a byte-level vocabulary end anywhere in a character: no piece has half of one."""
    for data in (noise, text.encode()):
        ends = sorted({place % (len(data) + 1) for place in places})
        tokens = [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]
        got = pieces(ByteDetokenizer(lambda token, tokens=tokens: tokens[token]), list(range(len(tokens))))
        assert "".join(got) == data.decode(errors="replace")
        if data is not noise:
            assert sum(piece.count("\ufffd") for piece in got) == text.count("\ufffd")
            assert all(piece == piece.encode().decode() for piece in got)


@pytest.fixture(scope="module")
def word_pieces() -> tokenizers.Tokenizer:
    """A vocabulary of words with spaces of their own and bytes for the rest, as models before byte-level ones have."""
    words = ["\u2581", "\u2581the", "\u2581dog", "s", "a", "b"]
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    vocabulary |= {word: 257 + n for n, word in enumerate(words)}
    merges: list[tuple[str, str]] = []
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@RUNS
@given(st.lists(st.sampled_from(["\u2581the", "\u2581dog", "s", "\u20ac", "\U0001f600", "a", "\u2581"]), max_size=10))
def test_other_vocabularies(word_pieces: tokenizers.Tokenizer, words: list[str]) -> None:
    ids = []
    for word in words:
        known = word_pieces.token_to_id(word)
        ids += [known] if known is not None else [1 + byte for byte in word.encode()]
    got = pieces(WindowDetokenizer(lambda window: word_pieces.decode(window)), ids)
    assert "".join(got) == word_pieces.decode(ids)
    assert not any("\ufffd" in piece for piece in got)


def test_demo_model() -> None:
    tokenizer = Tokenizer(DEMO_MODEL)
    text = "ROMEO:\nIs the day so young? \u20ac5"
    assert "".join(pieces(tokenizer.detokenizer(), tokenizer.encode(text))) == text
    chat = [tokenizer.token_name(t) for t in encode_chat(tokenizer, [{"role": "user", "content": "Romeo"}])]
    assert "<|user|>" in chat and chat[-1] == "<|assistant|>"


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer, text = Tokenizer(DEMO_MODEL), "ab " * (1 << 17)
    thread = threading.Thread(target=tokenizer.encode, args=(text,))
    thread.start()
    looks = 0
    while thread.is_alive():
        time.sleep(0.005)
        looks += 1
    assert looks > 10


def test_names_of_tokens(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_name(t) for t in tokenizer.encode("a \u00e9")] == ["a", " ", "bytes:\\xc3", "bytes:\\xa9"]
    assert tokenizer.token_name(0) == "<|begin|>" and tokenizer.token_bytes(0) == b""
    assert tokenizer.token_name(9999) == "" and tokenizer.token_bytes(9999) == b""


def test_chat_template(tokenizer: Tokenizer, tokenizer_folder: Path, tmp_path: Path) -> None:
    assert encode_chat(tokenizer, USER)[:1] == [0] and encode_chat(tokenizer, USER).count(0) == 1
    shutil.copy(tokenizer_folder / "tokenizer.json", tmp_path)
    bare = Tokenizer(tmp_path)
    with pytest.raises(ApiError, match="chat_template.jinja"):
        encode_chat(bare, USER)
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}!"}]
    for source in ("{{ messages[0]['content'] }}!", named):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
        ids = encode_chat(Tokenizer(tmp_path), USER)
        assert "".join(bare.token_name(t) for t in ids) == "Hello!"


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].missing.field }}", "missing"),
        ("{{ messages[7]['role'] }}", "template"),
        ("{{ 1 / 0 }}", "template"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ ''.__class__ }}{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% set x = messages.append(1) %}", "unsafe"),
        ("{% for i in range(100000000) %}{% endfor %}", "template"),
    ],
)
def test_templates_that_fail(source: str, word: str) -> None:
    with pytest.raises(ApiError) as refused:
        ChatTemplate(source, {}).render(USER)
    assert word in refused.value.message and refused.value.param == "messages"


def test_templates_may_use_what_transformers_offers() -> None:
    source = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}\n"
    assert ChatTemplate(source, {}).render([{"role": "a", "content": "<\u00e9>"}] * 2) == (
        '{"role": "a", "content": "<\u00e9>"}'
    )


@pytest.mark.parametrize("content", ["", "{}", "[1", '{"version": "1.0", "model": 5}'])
def test_files_that_are_no_tokenizer(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer"):
        Tokenizer(tmp_path)


def test_broken_neighbours(tokenizer_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tokenizer_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer_config.json is not JSON"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match="chat_template"):
        Tokenizer(tmp_path)


def test_texts_sure_to_be_too_long_are_refused_and_no_others() -> None:
    tokenizer = Tokenizer(Path(__file__).resolve().parents[2] / "models" / "splash-tiny")
    for text in ("", "a", "To be, or not to be", " " * 500, "\U0001f600" * 40, "and the Lord said unto Moses " * 20):
        assert tokenizer.encode(text, len(tokenizer.encode(text))) == tokenizer.encode(text)
    with pytest.raises(ApiError, match="prompt: at least .* too many; at most 4096 fit"):
        tokenizer.encode("ab " * 1_000_000, 4096)
    with pytest.raises(ApiError, match="messages: at least"):
        encode_chat(tokenizer, [{"role": "user", "content": "ab " * 1_000_000}], 4096)
