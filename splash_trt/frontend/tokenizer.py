"""Text to token ids and back, by tokenizer.json; answers are detokenized one token at a time."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import tokenizers

from splash_trt.frontend.chat_template import ChatTemplate
from splash_trt.frontend.errors import ApiError

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Detokenizes a growing sequence of ids. All that it returns, joined, is the text of the whole sequence."""

    def push(self, token: int) -> str:
        """The text that is certain with this token. Bytes of an incomplete character are held back."""

    def flush(self) -> str:
        """The rest, at the end of the sequence: a replacement character for an incomplete one."""


class ByteDetokenizer:
    """For byte-level vocabularies, where each token is a string of bytes. token_bytes: id -> its bytes."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._token_bytes(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other vocabulary: decodes a window of the last ids, as a token's text can depend on the ones before it.

    The window has the ids whose text was returned last, and all ids since.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._num_read = 0  # ids of the window whose text was returned
        self._read = ""

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        if len(text) <= len(self._read) or text.endswith(REPLACEMENT):
            return ""
        new = text[len(self._read) :]
        del self._ids[: self._num_read]
        self._num_read = len(self._ids)
        self._read = self._decode(self._ids)
        return new

    def flush(self) -> str:
        return self._decode(self._ids)[len(self._read) :] if self._ids else ""


class Tokenizer:
    """The vocabulary in `folder`/tokenizer.json, and the chat template beside it, if there is one."""

    def __init__(self, folder: Path) -> None:
        """ValueError names the file that is missing or broken."""
        path = folder / "tokenizer.json"
        try:
            self.source = path.read_bytes()
            """What the file holds."""
            self._tokenizer = tokenizers.Tokenizer.from_str(self.source.decode())
        except OSError as error:
            raise ValueError(f"tokenizer: {path} cannot be read: {error.strerror}") from None
        except Exception as error:  # the package raises plain Exceptions
            raise ValueError(f"tokenizer: {path} is not a tokenizer: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token for token, entry in added.items() if entry.special}
        self._is_byte_level = isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel)
        self._bytes: dict[int, bytes] = {}
        # The longest token gives a lower bound of a text's tokens only if each byte of the text is in some token.
        whole = self._is_byte_level and self._tokenizer.normalizer is None
        self._longest = max(map(len, self._tokenizer.get_vocab()), default=1) if whole else None
        self._template = ChatTemplate.load(folder)

    def knows(self, text: str) -> bool:
        """Whether a text is a token of the vocabulary, or the chat template contains it."""
        in_template = self._template is not None and text in self._template.source
        return in_template or self._tokenizer.token_to_id(text) is not None

    def encode(self, text: str, limit: int | None = None, add_special_tokens: bool = True) -> list[int]:
        """Ids of a prompt, with the special tokens that the model expects around it (such as begin-of-text).

        Raises ApiError, without encoding, if the text is sure to have more than `limit` ids: it could take minutes.
        """
        self._refuse_long(text, limit, "prompt")
        return self._encode(text, add_special_tokens)

    def _refuse_long(self, text: str, limit: int | None, field: str) -> None:
        if limit is None or self._longest is None:
            return
        least = -(-len(text.encode()) // self._longest)
        if least > limit:
            raise ApiError(f"{field}: at least {least} tokens are too many; at most {limit} fit", param=field)

    @property
    def chat_template(self) -> ChatTemplate:
        """The chat template. Raises ApiError if there is none."""
        if self._template is None:
            raise ApiError(
                "messages: this model has no chat template; use /v1/completions, or put chat_template.jinja beside"
                " tokenizer.json",
                param="messages",
                code="no_chat_template",
            )
        return self._template

    def encode_chat(self, text: str, limit: int | None = None) -> list[int]:
        """Ids of a rendered chat. Raises ApiError as `encode` does."""
        self._refuse_long(text, limit, "messages")
        return self._encode(text, False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Not encode(), which holds the interpreter lock: with a long text, all threads, the event loop too, would wait.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def special_ids(self, texts: Sequence[str]) -> frozenset[int]:
        """Ids of those texts that are special tokens."""
        ids = [self._tokenizer.token_to_id(text) for text in texts]
        return frozenset(token for token in ids if token is not None and token in self._special)

    def detokenizer(self, shown: frozenset[int] = frozenset(), show_all: bool = False) -> Detokenizer:
        """A detokenizer that leaves out special tokens, except those in `shown`, or none if show_all."""
        hidden = frozenset() if show_all else frozenset(self._special - shown)
        if self._is_byte_level:
            return ByteDetokenizer(lambda token: b"" if token in hidden else self._spelled(token))
        return WindowDetokenizer(lambda ids: self._decode([token for token in ids if token not in hidden]))

    def decode(self, ids: list[int]) -> str:
        """The text of a whole sequence, special tokens included."""
        return self._decode(ids)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text; nothing for special tokens and ids without a token."""
        return b"" if token in self._special else self._spelled(token)

    def token_name(self, token: int) -> str:
        """A token's name in log-probabilities: its text, or its bytes if they are not valid UTF-8 by themselves."""
        spelled = self._spelled(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def _spelled(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    def _spell(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if not self._is_byte_level:
            return (name if token in self._special else self._decode([token])).encode()
        # As in the package's decoder: a token with a character that does not stand for a byte is taken as text.
        if all(character in _BYTE_OF for character in name):
            return bytes(_BYTE_OF[character] for character in name)
        return name.encode()


def _byte_of_character() -> dict[str, int]:
    """{character: byte}: byte-level vocabularies write printable bytes as themselves, the n-th other as U+0100 + n."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()
