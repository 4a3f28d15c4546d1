"""Built plans by what decides their content."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class PlanCache:
    """A folder of plans by key, each with a small file that says what it must be. Builders may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.plan"

    def find(self, key: str) -> Mapping[str, Any] | None:
        """What was said when it was added; None if it is missing, cut short or changed."""
        try:
            entry = json.loads((self.folder / f"{key}.json").read_bytes())
            data = self.path(key).read_bytes()
        except (OSError, ValueError):
            return None
        fits = isinstance(entry, dict) and entry.get("checksum") == plan_checksum(data)
        return entry if fits else None

    def add(self, key: str, data: bytes, seconds: float) -> Mapping[str, Any]:
        entry = {"num_bytes": len(data), "checksum": plan_checksum(data), "seconds": round(seconds, 3)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write(self.path(key), data)
            self._write(self.folder / f"{key}.json", json.dumps(entry).encode())
        except OSError as error:
            raise ValueError(
                f"{self.folder}: cannot be written: {error.strerror or error}; choose another place with --plan-cache"
            ) from error
        return entry

    def _write(self, path: Path, data: bytes) -> None:
        """Whole or not at all."""
        descriptor, name = tempfile.mkstemp(dir=self.folder, prefix=path.name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


def plan_checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
