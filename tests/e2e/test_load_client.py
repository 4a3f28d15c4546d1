"""A load client that others wrote, guidellm, against the real server: all is served, and both count the same."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.servers import MODEL, ROOT, Server, wait_until

pytestmark = [pytest.mark.mpi, pytest.mark.nightly, pytest.mark.timeout(1200)]

STREAMS = 8
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32
INSTALL_S = 600.0
RUN_S = 400.0  # it starts nine processes that import torch
COUNTS = ("splash_prompt_tokens_total", "splash_output_tokens_total")


@pytest.fixture(scope="module")
def guidellm() -> str:
    argv = ["nice", "bash", str(ROOT / "scripts" / "guidellm.sh")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def samples(server: Server) -> Iterator[tuple[str, float]]:
    """Name, or name and reason, and value of what /metrics counts of requests and their tokens."""
    for family in text_string_to_metric_families(server.ask("GET", "/metrics").data.decode()):
        for sample in family.samples:
            if sample.name in COUNTS:
                yield sample.name, sample.value
            elif sample.name == "splash_requests_total":
                yield sample.labels["reason"], sample.value


def load(guidellm: str, server: Server, path: str, constraint: dict[str, Any], folder: Path) -> Any:
    """guidellm's report of one benchmark; AssertionError if it failed."""
    options = {
        "--backend": {"kind": "openai_http", "target": server.url, "request_format": path},
        "--profile": {"kind": "concurrent", "streams": [STREAMS]},
        "--constraint": constraint,
        "--tokenizer": {"kind": "hf_auto", "model": str(MODEL)},
        "--data": {"kind": "synthetic_text", "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS},
        "--output": {"kind": "json", "path": str(folder / "report.json")},
    }
    argv = [guidellm, "run", "--disable-console"]
    for name, value in options.items():
        argv += [name, json.dumps(value)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stderr
    (benchmark,) = json.loads((folder / "report.json").read_text())["benchmarks"]
    return benchmark["metrics"]


def idle(server: Server) -> bool:
    status = server.ask("GET", "/v1/layout").json["status"]
    return status["running"] == status["waiting"] == 0


def run(
    guidellm: str, server: Server, path: str, constraint: dict[str, Any], folder: Path
) -> tuple[Any, dict[str, int]]:
    """guidellm's metrics, and by how much the server's counts grew."""
    before = dict(samples(server))
    metrics = load(guidellm, server, path, constraint, folder)
    wait_until(lambda: idle(server), why="the end of what guidellm left")
    counted = {name: int(value - before.get(name, 0)) for name, value in samples(server)}
    latencies = {name: metrics[name]["successful"] for name in ("time_to_first_token_ms", "inter_token_latency_ms")}
    print(path, metrics["request_totals"], counted, {name: round(one["median"]) for name, one in latencies.items()})
    assert metrics["request_concurrency"]["total"]["max"] == STREAMS
    assert metrics["request_totals"]["errored"] == counted["error"] == counted["stop"] == 0
    return metrics, counted


def total(metrics: Any, name: str, status: str = "total") -> int:
    return int(metrics[name][status]["total_sum"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_number_of_requests_is_served_and_counted_to_the_token(
    guidellm: str, server: Server, path: str, tmp_path: Path
) -> None:
    requests = 5 * STREAMS
    metrics, counted = run(guidellm, server, path, {"kind": "max_requests", "count": requests}, tmp_path)
    assert metrics["request_totals"]["successful"] == metrics["request_totals"]["total"] == requests
    assert (counted["length"], counted["cancelled"]) == (requests, 0)
    assert counted["splash_output_tokens_total"] == total(metrics, "output_token_count") == requests * OUTPUT_TOKENS
    assert counted["splash_prompt_tokens_total"] == total(metrics, "prompt_token_count") >= requests * PROMPT_TOKENS


def test_streams_that_are_left_at_the_end_of_the_time_are_counted_as_far_as_they_came(
    guidellm: str, server: Server, tmp_path: Path
) -> None:
    constraint = {"kind": "max_duration", "seconds": 20}
    metrics, counted = run(guidellm, server, "/v1/completions", constraint, tmp_path)
    successful, left = (metrics["request_totals"][status] for status in ("successful", "incomplete"))
    assert successful >= STREAMS >= left
    # One that guidellm leaves may never have reached the server, or have ended there.
    assert successful <= counted["length"] and counted["length"] + counted["cancelled"] <= successful + left
    assert total(metrics, "output_token_count", "successful") == successful * OUTPUT_TOKENS
    sent = counted["splash_output_tokens_total"]
    assert total(metrics, "output_token_count") <= sent <= (successful + left) * OUTPUT_TOKENS
