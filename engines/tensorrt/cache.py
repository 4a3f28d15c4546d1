"""A cache of built plans; a plan's key is a hash of everything that decides its content (plans.py)."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from splash_engines.manifest import checksum

LOCK = "lock"
WRITING = "writing"  # a file that is being written; if a killed builder leaves one, the next builder overwrites it

_AGAIN = "build again, or choose another place with --plan-cache"


class Entry(msgspec.Struct, kw_only=True, frozen=True):
    """What a plan's file in the cache must be like."""

    key: str
    num_bytes: int
    checksum: str
    seconds: float
    """How long building it took."""


class PlanCache:
    """A folder of plans, by key, each with a small file that holds its Entry. Builders may share the folder. TensorRT
    builds different bytes each time, and engines have their plans' checksums, so the first plan that is added stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.plan"

    def find(self, key: str) -> Entry | None:
        """The plan's entry; None if the plan is missing, cut short or changed, or is another one."""
        try:
            entry = msgspec.json.decode((self.folder / f"{key}.json").read_bytes(), type=Entry)
            data = self.path(key).read_bytes()
        except (OSError, ValueError):  # msgspec's errors are of the latter
            return None
        return entry if (entry.key, entry.checksum) == (key, checksum(data)) else None

    def add(self, key: str, data: bytes, seconds: float) -> Entry:
        """Adds a plan that was built, unless another builder has added one meanwhile. Returns the entry of the one in
        the cache. ValueError, which names the folder, if it cannot be written."""
        entry = Entry(key=key, num_bytes=len(data), checksum=checksum(data), seconds=round(seconds, 3))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._alone():
                found = self.find(key)
                if found is None:
                    self._write(self.path(key), data)
                    self._write(self.folder / f"{key}.json", msgspec.json.encode(entry))
        except OSError as error:
            raise ValueError(
                f"{self.folder}: cannot be written: {error.strerror or error}; choose another place with --plan-cache"
            ) from error
        return found or entry

    def read(self, key: str, expected: str) -> bytes:
        """The bytes of a plan that was found or added. expected: its entry's checksum.

        ValueError, naming the file and a remedy, if it is not the same plan any more.
        """
        try:
            data = self.path(key).read_bytes()
        except OSError as error:
            raise ValueError(f"{self.path(key)}: cannot be read: {error.strerror or error}; {_AGAIN}") from error
        if checksum(data) != expected:
            raise ValueError(f"{self.path(key)}: was changed while it was in use; {_AGAIN}")
        return data

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While it is open, no other process adds anything. The lock of a process that dies is released."""
        descriptor = os.open(self.folder / LOCK, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _write(self, path: Path, data: bytes) -> None:
        """Writes a file so that it appears complete or not at all."""
        (self.folder / WRITING).write_bytes(data)
        os.replace(self.folder / WRITING, path)
