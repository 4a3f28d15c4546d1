"""Every kernel compiles for every architecture in tests/kernels/aot.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PARTS = sorted(path.stem for path in Path(__file__).parent.glob("aot_*.py"))


@pytest.mark.kernels
@pytest.mark.parametrize("part", PARTS)
def test_compiles(part: str, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.kernels.aot", part]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), f"{part} lists no kernels"
