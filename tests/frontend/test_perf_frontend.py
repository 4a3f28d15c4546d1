"""The frontends' benchmark runs, and counts what it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import frontend, harness


@pytest.mark.nightly
def test_a_short_run(tmp_path: Path) -> None:
    sizes = ["--frontends", "2", "--streams", "8", "--offered", "800", "--seconds", "2", "--rounds", "2"]
    assert frontend.main([*sizes, "--results", str(tmp_path)]) == 0
    result = harness.read(tmp_path / "frontend" / "tokens.json")
    (row,) = result.rows
    assert result.check.passed and row["lost"] == 0
    assert row["tokens_per_s"] == pytest.approx(800, rel=0.2)
    assert 0 < float(row["delay_p50_ms"] or 0) < 1000 and 1 <= float(row["tokens_per_event"] or 0) < 2
    assert (tmp_path / "frontend" / "tokens.md").exists()
