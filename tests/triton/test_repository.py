"""What `splash-trt triton-repo` writes."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from splash_trt.frontend.client_socket import check_endpoint
from splash_trt.triton_backend.command import FILES, triton_repo, write_repository
from splash_trt.triton_backend.model_config import INPUTS, OUTPUTS
from splash_trt.triton_backend.repository.inputs import COPIED, FLAGS
from tests.triton.servers import ROOT, SCRIPT

ENDPOINT = "ipc:///run/splash/clients"
DOCS = ROOT / "docs" / "triton.md"


def test_the_command(tmp_path: Path) -> None:
    done = CliRunner().invoke(triton_repo, ["--out", str(tmp_path), "--endpoint", ENDPOINT, "--model-name", "one"])
    assert done.exit_code == 0 and done.output == f"Wrote {tmp_path / 'one'}\n"
    assert sorted(path.name for path in (tmp_path / "one").rglob("*")) == sorted(["1", "config.pbtxt", *FILES])
    config = (tmp_path / "one" / "config.pbtxt").read_text()
    assert 'name: "one"' in config and "max_batch_size: 0" in config and json.dumps(ENDPOINT) in config


def test_a_second_time_replaces_the_first(tmp_path: Path) -> None:
    write_repository(tmp_path, ENDPOINT, "splash", batched=True)
    config = tmp_path / "splash" / "config.pbtxt"
    assert "max_batch_size: 1" in config.read_text()
    write_repository(tmp_path, ENDPOINT, "splash", max_requests=7)
    assert "max_batch_size: 0" in config.read_text() and '"7"' in config.read_text()


@pytest.mark.parametrize("name", ["", "a/b", "..", "-x", 'a"b'])
def test_names_that_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="^model_name: "):
        write_repository(tmp_path, ENDPOINT, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "clients",
        "ipc://clients",
        "tcp://0.0.0.0:9000",
        "tcp://10.0.0.1:9000",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "ipc:///" + "long" * 30,
    ],
)
def test_endpoints_that_are_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="^client_endpoint: "):
        check_endpoint(endpoint)


@pytest.mark.parametrize("endpoint", [ENDPOINT, "tcp://127.0.0.1:9000", "tcp://localhost:9000"])
def test_endpoints_that_are_taken(endpoint: str) -> None:
    check_endpoint(endpoint)


def test_it_stands_alone(tmp_path: Path) -> None:
    """Where it runs, splash_trt is not installed."""
    allowed = {"numpy", "zmq", "msgspec", "triton_python_backend_utils", *sys.stdlib_module_names}
    version = write_repository(tmp_path, ENDPOINT, "splash") / "1"
    for file in FILES:
        for node in ast.walk(ast.parse((version / file).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            assert {name.partition(".")[0] for name in names} <= allowed, file
    code = "import importlib; importlib.import_module('1.connection'); importlib.import_module('1.outputs')"
    subprocess.run([sys.executable, "-c", code], cwd=version.parent, check=True, timeout=60)


def test_every_input_is_read(tmp_path: Path) -> None:
    source = (write_repository(tmp_path, ENDPOINT, "splash") / "1" / "inputs.py").read_text()
    ignored = {"pad_id"}  # nothing is padded
    for spec in INPUTS:
        assert spec.name in ignored or f'"{spec.name}"' in source, spec.name
    assert {*COPIED, *FLAGS} <= {spec.name for spec in INPUTS}


@pytest.mark.parametrize(("arguments", "message"), [((), "usage: "), (("/no/such",), "/no/such is no folder")])
def test_the_script_says_what_it_wants(triton_installed: None, arguments: tuple[str, ...], message: str) -> None:
    done = subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith(f"scripts/triton_server.sh: {message}")


def test_the_documents_table_names_all() -> None:
    text = DOCS.read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))
    assert named == {spec.name for spec in (*INPUTS, *OUTPUTS)}
