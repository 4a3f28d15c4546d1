"""/openapi.json is right: every answer of the server is one that it describes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from splash_trt.frontend.openapi import ROUTES, Route, document
from tests.frontend.fake_engine import FakeEngine, ready_message
from tests.frontend.servers import FrontendProcess, start_frontend, wait_until_ready

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
RUNS = settings(
    max_examples=20,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)

# Bodies and parameters as the document has them, and others; a path's parameter may be any text.
CASES = [
    (route, mode)
    for route in ROUTES
    for mode in GenerationMode
    if mode is GenerationMode.POSITIVE or route.body is not None or "{" not in route.path and route.parameters
]
NAMES = [f"{route.method} {route.path} {mode.value}" for route, mode in CASES]


@pytest.fixture(scope="module")
def quick(tokenizer_folder: Path) -> Iterator[FrontendProcess]:
    """Whatever is asked of it, an answer takes one step."""
    with tempfile.TemporaryDirectory(prefix="splash-") as folder:
        address = f"ipc://{folder}/link"
        engine = FakeEngine(address, ready_message(400, max_context=256), tokens_per_step=256)
        engine.start()
        frontend = start_frontend(address, "--tokenizer", str(tokenizer_folder))
        yield wait_until_ready(frontend)
        frontend.end()
        engine.stop()


@pytest.fixture(scope="module")
def api(quick: FrontendProcess) -> Any:
    return schemathesis.openapi.from_url(f"{quick.url}/openapi.json")


def explore(api: Any, route: Route, mode: GenerationMode, runs: settings) -> None:
    @runs
    @given(case=api[route.path][route.method].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        case.call_and_validate(checks=CHECKS)

    ask()


@pytest.mark.parametrize(("route", "mode"), CASES, ids=NAMES)
def test_every_answer_is_one_that_the_document_allows(api: Any, route: Route, mode: GenerationMode) -> None:
    explore(api, route, mode, RUNS)


@pytest.mark.nightly
@pytest.mark.parametrize(("route", "mode"), CASES, ids=NAMES)
def test_more_answers(api: Any, route: Route, mode: GenerationMode) -> None:
    explore(api, route, mode, settings(RUNS, max_examples=400))


def test_the_document_has_every_route(quick: FrontendProcess) -> None:
    paths = quick.ask("GET", "/openapi.json").json["paths"]
    served = {(path, method) for path, methods in paths.items() for method in methods}
    assert served == {(route.path, route.method) for route in ROUTES}
    for path, method in served:
        answer = quick.ask(method.upper(), path.replace("{model}", "echo"), {} if method == "post" else None)
        assert answer.status in (200, 400), (path, answer.data)


def test_names_in_the_document_are_plain() -> None:
    schemas = document(None)["components"]["schemas"]
    assert all(name.isidentifier() for name in schemas), list(schemas)
    body = schemas["CompletionBody"]
    assert body["additionalProperties"] is False and body["required"] == ["prompt"]
    assert {"n", "logit_bias", "stop", "stream_options", "guided_json"} <= body["properties"].keys()
