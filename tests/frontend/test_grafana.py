"""The Grafana dashboard asks for what /metrics has: every name in its queries, with the labels that they use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from splash_trt.link import Decided, Frames, Status, SwitchReport
from tests.frontend.fake_engine import FakeEngine, ready_message
from tests.frontend.servers import start_frontend, wait_until, wait_until_ready

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "splash-trt.json"
WORDS = {"sum", "max", "by", "le", "rate", "increase", "changes", "histogram_quantile", "label_values"}
OF_PROMETHEUS = {"instance"}  # labels that the scraper adds


def board() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def queries() -> list[str]:
    found = [target["expr"] for panel in board()["panels"] for target in panel.get("targets", ())]
    found += [variable["query"]["query"] for variable in board()["templating"]["list"] if variable["type"] == "query"]
    return found + [annotation["expr"] for annotation in board()["annotations"]["list"]]


def names_and_labels(query: str) -> tuple[set[str], set[str]]:
    """What a query asks for."""
    labels = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
    labels |= {label for group in re.findall(r"\{([^}]*)\}", query) for label in re.findall(r"(\w+)[=!]", group)}
    rest = re.sub(r"by \([^)]*\)|\{[^}]*\}|\[[^]]*\]|label_values\((\w+), \w+\)", r" \1 ", query)
    return set(re.findall(r"[a-zA-Z_:][\w:]*", rest)) - WORDS, labels - OF_PROMETHEUS


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[str]]]:
    """Names of samples and the labels of each, after one of everything has happened."""
    address = f"ipc://{tmp_path_factory.mktemp('s')}/link"
    engine = FakeEngine(address, ready_message(400))
    engine.start()
    frontend = start_frontend(address)
    try:
        wait_until_ready(frontend)
        assert frontend.ask("POST", "/v1/completions", {"prompt": [7, 8], "max_tokens": 4}).status == 200
        record: dict[str, Any] = {
            "source": "tp",
            "target": "dp",
            "why": "a test",
            "ended": True,
            "outcome": "committed",
        }
        record |= {"bytes_between_ranks": {"pages": 5}, "bytes_inside_ranks": 1, "seconds_in": {"armed": 0.5}}
        engine.send(SwitchReport("first", 1, {**record, "slowdown": 0.1, "stall_s": 0.01}))
        engine.send(SwitchReport("first", 2, {**record, "outcome": "aborted: no room", "abort": "no_room"}))
        status = Status("tp", 0, "steady", None, 1.0, "auto", 0, 0, (0, 0), (0, 0), (9, 9))
        decided = Decided("tp", "dp", "crowd")
        engine.send(Frames("first", 9, 3, 0.1, status, layout="tp", preemptions=1, decision=decided))
        wait_until(lambda: b"splash_decisions_total{" in frontend.ask("GET", "/metrics").data)
        text = frontend.ask("GET", "/metrics").data.decode()
    finally:
        engine.stop()
        frontend.end()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    labels: dict[str, set[str]] = {}
    for sample in samples:
        labels.setdefault(sample.name, set()).update(sample.labels)
    yield labels


def test_every_query_asks_for_what_is_there(exposed: dict[str, set[str]]) -> None:
    assert len(queries()) > 40
    for query in queries():
        names, labels = names_and_labels(query)
        assert names and names <= set(exposed), (query, names - set(exposed))
        for name in names:
            assert labels <= exposed[name], (query, labels - exposed[name])


def test_the_check_notices_a_wrong_name_and_a_wrong_label() -> None:
    query = (
        'histogram_quantile(0.5, sum by (le, kind) (rate(splash_x_bucket{instance=~"$instance"}[$__rate_interval])))'
    )
    assert names_and_labels(query) == ({"splash_x_bucket"}, {"le", "kind"})
    query = 'sum(splash_a{state!="steady"}) / max by (rank) (splash_b)'
    assert names_and_labels(query) == ({"splash_a", "splash_b"}, {"state", "rank"})
    assert names_and_labels("label_values(splash_c, instance)") == ({"splash_c"}, set())


def test_panels_are_whole_and_do_not_overlap() -> None:
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) == 23
    for panel in panels:
        assert panel["title"] and (panel["type"] == "row" or panel["targets"])
        refs = [target["refId"] for target in panel.get("targets", ())]
        assert len(refs) == len(set(refs))
