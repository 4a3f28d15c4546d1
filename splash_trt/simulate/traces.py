"""Traces: when each request of a load arrives, and how long its prompt and its answer are. Readers of two public
formats.

R requests, numbered from 0; of requests that arrive at the same time, the lower number is first.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

NOT_AFTER = -1


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Arrays [R]. A request arrives by the clock (an open load), or after another has ended (a closed one)."""

    name: str
    arrival_s: np.ndarray
    """float64: seconds after the begin of the request's wave, or, if `after` names a request, after that one's end."""
    prompt_tokens: np.ndarray
    """int64, at least 1."""
    output_tokens: np.ndarray
    """int64, at least 1, the end-of-text token included. Known to the simulated ranks only, never to the scheduler."""
    after: np.ndarray
    """int64: an earlier request of the same wave that has to end first, or NOT_AFTER."""
    wave: np.ndarray
    """int64, never decreasing: wave 0 begins at once, each other wave when all requests of earlier ones have ended."""
    notes: tuple[str, ...] = field(default=())
    """What a reader of the results should know about this load."""

    def __post_init__(self) -> None:
        numbers = np.arange(len(self.arrival_s))
        assert len(numbers) and all(len(a) == len(numbers) for a in (self.prompt_tokens, self.output_tokens))
        assert len(self.after) == len(self.wave) == len(numbers)
        assert (self.prompt_tokens >= 1).all() and (self.output_tokens >= 1).all() and (self.arrival_s >= 0).all()
        assert (self.after < numbers).all() and (np.diff(self.wave) >= 0).all() and self.wave[0] == 0
        chained = np.flatnonzero(self.after >= 0)
        assert (self.wave[chained] == self.wave[self.after[chained]]).all()

    @property
    def num_requests(self) -> int:
        return len(self.arrival_s)

    @classmethod
    def open(
        cls,
        name: str,
        arrival_s: np.ndarray,
        prompt_tokens: np.ndarray,
        output_tokens: np.ndarray,
        *,
        after: np.ndarray | None = None,
        notes: tuple[str, ...] = (),
    ) -> Trace:
        """A trace of one wave; without `after`, requests are sorted by arrival."""
        count = len(arrival_s)
        order = np.argsort(arrival_s, kind="stable") if after is None else np.arange(count)
        return cls(
            name=name,
            arrival_s=np.asarray(arrival_s, np.float64)[order],
            prompt_tokens=np.asarray(prompt_tokens, np.int64)[order],
            output_tokens=np.asarray(output_tokens, np.int64)[order],
            after=np.full(count, NOT_AFTER) if after is None else np.asarray(after, np.int64),
            wave=np.zeros(count, np.int64),
            notes=notes,
        )

    def first(self, count: int) -> Trace:
        """The first `count` requests; all if there are fewer."""
        return self._with(lambda a: a[:count])

    def at_rate(self, scale: float) -> Trace:
        """The same requests, arriving `scale` times as fast. Pauses after a request's end stay."""
        return dataclasses.replace(
            self, arrival_s=np.where(self.after >= 0, self.arrival_s, self.arrival_s / scale)
        )

    def clipped(self, limit: int) -> tuple[Trace, int]:
        """The trace with no request above `limit` tokens, prompt and output together, and how many were shortened.

        It is the prompt that is shortened, if that is enough: the number of steps matters more to how the load unfolds.
        """
        assert limit >= 2
        output = np.minimum(self.output_tokens, limit - 1)
        prompt = np.minimum(self.prompt_tokens, limit - output)
        shortened = int(((output < self.output_tokens) | (prompt < self.prompt_tokens)).sum())
        return dataclasses.replace(self, prompt_tokens=prompt, output_tokens=output), shortened

    def _with(self, pick: Any) -> Trace:
        names = ("arrival_s", "prompt_tokens", "output_tokens", "after", "wave")
        return dataclasses.replace(self, **{name: pick(getattr(self, name)) for name in names})


def joined(name: str, parts: Sequence[Trace], *, in_turn: bool) -> Trace:
    """Joins traces into one: all at the same time, or in_turn, each when the one before has ended entirely."""
    assert in_turn or all(part.wave[-1] == 0 for part in parts)
    after, wave, begin, waves = [], [], 0, 0
    for part in parts:
        after.append(np.where(part.after >= 0, part.after + begin, NOT_AFTER))
        wave.append(part.wave + waves)
        begin += part.num_requests
        waves += int(part.wave[-1]) + 1 if in_turn else 0
    return Trace(
        name=name,
        arrival_s=np.concatenate([part.arrival_s for part in parts]),
        prompt_tokens=np.concatenate([part.prompt_tokens for part in parts]),
        output_tokens=np.concatenate([part.output_tokens for part in parts]),
        after=np.concatenate(after),
        wave=np.concatenate(wave),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )


AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")
PREFIX_NOTE = (
    "prompts that share a beginning are computed whole each time: this server keeps no prefixes, so these numbers are "
    "those of a server without a prefix cache"
)


def read_trace(path: Path, *, requests: int | None = None) -> Trace:
    """A file in Azure's CSV format (TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake's JSON lines.

    requests: read only so many. ValueError names the file, the line and the field; OSError as the system has it.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets put a byte order mark before the text
        try:
            rows = list(_mooncake(path, file) if path.suffix == ".jsonl" else _azure(path, file))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"trace: {path}: not UTF-8 text: {error.reason} at byte {error.start}; if it is compressed, unpack it"
            ) from None
    if not rows:
        raise ValueError(f"trace: {path}: there is no request in it")
    seconds, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    notes = (PREFIX_NOTE,) if path.suffix == ".jsonl" else ()
    trace = Trace.open(path.stem, seconds - seconds.min(), prompt, output, notes=notes)
    return trace if requests is None else trace.first(requests)


Row = tuple[float, int, int]  # seconds, prompt tokens, output tokens


def _azure(path: Path, file: Any) -> Iterator[Row]:
    """Public traces of Azure's LLM services (github.com/Azure/AzurePublicDataset)."""
    reader = csv.reader(file)
    rows = _rows(path, reader)
    header = next(rows, [])
    if header != AZURE_COLUMNS:
        raise ValueError(
            f"trace: {path}, line 1: the columns are {reprlib.repr(','.join(header))}; they must be "
            f"{','.join(AZURE_COLUMNS)} (or the file's name must end in .jsonl, for Mooncake's format)"
        )
    for cells in rows:
        where = f"trace: {path}, line {reader.line_num}"
        if not cells:
            continue
        if len(cells) != len(AZURE_COLUMNS):
            raise ValueError(f"{where}: {len(cells)} columns; there must be {len(AZURE_COLUMNS)}")
        yield _timestamp(where, cells[0]), _tokens(where, AZURE_COLUMNS[1], cells[1]), _tokens(
            where, AZURE_COLUMNS[2], cells[2]
        )


def _rows(path: Path, reader: Any) -> Iterator[list[str]]:
    """The reader's rows; its errors (a field of more than 128 KiB) become ValueErrors with file and line."""
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ValueError(f"trace: {path}, line {max(1, reader.line_num)}: {error}") from None
        if cells is None:
            return
        yield cells


def _mooncake(path: Path, file: Any) -> Iterator[Row]:
    """Mooncake's traces (FAST '25): timestamp in ms, input_length, output_length; hash_ids are not used."""
    for number, line in enumerate(file, start=1):
        where = f"trace: {path}, line {number}"
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # ValueError: also of a number with thousands of digits
            raise ValueError(f"{where}: not a JSON object") from None
        if not isinstance(entry, dict):
            raise ValueError(f"{where}: not a JSON object")
        missing = [name for name in ("timestamp", "input_length", "output_length") if name not in entry]
        if missing:
            raise ValueError(f"{where}: there is no {missing[0]}")
        stamp = entry["timestamp"]
        if isinstance(stamp, bool) or not isinstance(stamp, int | float) or not 0 <= stamp < 1e15:
            raise ValueError(f"{where}: timestamp: {stamp!r} is not a number of milliseconds from 0 to 1e15")
        prompt, output = (_tokens(where, name, entry[name]) for name in ("input_length", "output_length"))
        yield stamp / 1000, prompt, output


MAX_TOKENS = 1 << 30


def _tokens(where: str, name: str, value: Any) -> int:
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdigit() and len(value) < 12 else value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
        raise ValueError(f"{where}: {name}: {value!r} is not a whole number of tokens from 1 to {MAX_TOKENS}")
    return value


def _timestamp(where: str, text: str) -> float:
    """Seconds since 1970, UTC if no zone is given. Accepts fractions of seven digits, as .NET writes them."""
    match = TIMESTAMP.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        day, time, fraction, zone = match.groups()
        moment = datetime.fromisoformat(f"{day} {time}{(zone or '').replace('Z', '+00:00')}")
    except ValueError:
        raise ValueError(
            f"{where}: {AZURE_COLUMNS[0]}: {text!r} is not a time such as 2023-11-16 18:17:03.9799600"
        ) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
    return moment.timestamp() + float(fraction or 0)
