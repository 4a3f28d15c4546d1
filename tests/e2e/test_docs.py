"""The command lines of README.md and docs/ run, and what they print looks as the pages say."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from splash_trt import environment
from splash_trt.commands.serve import serve_command
from splash_trt.frontend.options import take_settings
from splash_trt.serve import ServeOptions
from tests.e2e.doc_pages import PAGES, ROOT, Block, blocks
from tests.e2e.fork_server import ForkServer
from tests.e2e.servers import MODEL, START_S, Server, StreamReader, free_port, wait_until
from tests.oracles.published_configs import V3

ALL = [block for page in PAGES for block in blocks(page)]
BLOCK_S = 120.0


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    with tempfile.TemporaryDirectory(prefix="splash-docs-") as folder:
        server = ForkServer(Path(folder))
        try:
            yield server
        finally:
            server.close()


def scratch(folder: Path, engine: Path, *, with_engine: bool) -> Path:
    """A folder that looks like the repository's root, as far as the pages know it."""
    models, build = folder / "models", folder / "build"
    models.mkdir()
    build.mkdir()
    (models / MODEL.name).symlink_to(MODEL)
    (models / "DeepSeek-V3").mkdir()
    (models / "DeepSeek-V3" / "config.json").write_text(json.dumps(V3))
    if with_engine:
        (build / "engine").symlink_to(engine)
    return folder


def for_server(text: str, server: Server) -> str:
    """With the address and the model's name of the test's server."""
    return text.replace("localhost:8000", f"127.0.0.1:{server.port}").replace('"engine"', f'"{MODEL.name}"')


def run(text: str, folder: Path, bin_folder: Path) -> str:
    """Runs a block's text with bash; what it printed."""
    env = environment.for_mpirun() | {"OMP_NUM_THREADS": "1", "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BLOCK_S,
    )  # fmt: skip
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def output_of(page: Path, block: Block) -> Block | None:
    """The block with its output, if one follows."""
    all_of_page = blocks(page)
    following = all_of_page[all_of_page.index(block) + 1 :][:1]
    return following[0] if following and following[0].kind.startswith("output") else None


def check_output(shown: Block | None, printed: str) -> None:
    values = list(json_values(printed))
    if shown is None or shown.language == "text":
        errors = [value for value in values if isinstance(value, dict) and "error" in value]
        assert not errors, errors
    if shown is None:
        return
    if shown.language == "text":
        check_lines(shown, printed)
        return
    wanted, value = json.loads(shown.text), values[-1]
    _, _, part = shown.kind.partition("output-part ")
    if part:
        value = value[part]
    check_like(wanted, value, shown.place, whole=not part)


def json_values(text: str) -> Iterator[Any]:
    """Those that are printed one after another."""
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return
        yield value
        at = text.find("{", end)


def check_like(wanted: Any, value: Any, place: str, *, whole: bool) -> None:
    """Of the same kinds, with the same keys (if whole; else at least those), and an error's words as shown."""
    if isinstance(wanted, dict):
        assert isinstance(value, dict), f"{place}: {value!r}"
        lacking, more = set(wanted) - set(value), set(value) - set(wanted)
        assert not lacking and not (whole and more), f"{place}: lacks {lacking}, has {more}"
        for key in wanted:
            check_like(wanted[key], value[key], f"{place}.{key}", whole=whole)
    elif isinstance(wanted, list):
        assert isinstance(value, list), f"{place}: {value!r}"
        for one, other in zip(wanted, value, strict=False):
            check_like(one, other, place, whole=whole)
        assert not wanted or len(value) >= len(wanted), f"{place}: {value!r}"
    elif ".error." in place:
        assert value == wanted, place
    elif isinstance(wanted, str):
        start, cut, _ = wanted.partition("…")
        assert isinstance(value, str), f"{place}: {value!r}"
        assert not cut or " " in start or value.startswith(start), f"{place}: {value!r}"
    elif wanted is not None:
        number = isinstance(wanted, int | float) and not isinstance(wanted, bool)
        kind = int | float if number else bool
        assert isinstance(value, kind), f"{place}: {value!r}"


def plain(line: str) -> str:
    """Without what differs from run to run: numbers and widths."""
    return re.sub(r"\s+", " ", re.sub(r"-?\d[\d,.]*", "0", line)).strip()


def check_lines(shown: Block, printed: str) -> None:
    """Each line that is shown was printed, in this order; … stands for anything."""
    lines = iter([plain(line) for line in printed.splitlines()])
    for line in map(plain, shown.text.splitlines()):
        start, more, _ = line.partition("…")
        if line and start:
            found = any(other.startswith(start) if more else other == line for other in lines)
            assert found, f"{shown.place}: {line!r} was not printed (any more) in\n{printed}"


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.kind == "test" for b in blocks(p))], ids=lambda p: p.name)
def test_blocks_run(page: Path, engine: Path, server: Server, forks: ForkServer, tmp_path: Path) -> None:
    found = [block for block in blocks(page) if block.kind == "test"]
    makes_it = any("--out build/engine" in block.text for block in found)
    folder = scratch(tmp_path, engine, with_engine=not makes_it)
    try:
        for block in found:
            print(block.place)
            check_output(output_of(page, block), run(for_server(block.text, server), folder, forks.bin))
    finally:
        server.ask("POST", "/v1/layout", {"layout": "auto"})


def test_reasons_look_as_shown(server: Server) -> None:
    """explain, once the policy has looked at some load."""
    (shown,) = [block for block in ALL if block.kind == "explain"]
    server.ask("POST", "/v1/layout", {"layout": "auto"})
    reader = StreamReader(server, {"prompt": [1, 2, 3], "max_tokens": 40})

    def seen() -> Any:
        policy = server.ask("GET", "/v1/layout?explain=1").json["explain"]["policy"]
        return policy if policy["candidates"] else None

    policy = wait_until(seen, 60, "a look at the load")
    reader.join(60)
    wanted = json.loads(shown.text)
    check_like(wanted, {key: value for key, value in policy.items() if key != "objective"}, shown.place, whole=True)


@pytest.mark.parametrize("block", [b for b in ALL if b.kind.endswith("serve")], ids=lambda b: b.place)
def test_servers_could_start(block: Block, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as that is known before there are ranks."""
    monkeypatch.chdir(scratch(tmp_path, engine, with_engine=True))
    words = shlex.split(block.text, comments=True)
    arguments = words[words.index("splash-trt") + 2 :]
    fields = serve_command.make_context("serve", arguments).params
    del fields["load"]  # another name of dummy_weights
    http = take_settings(fields)
    options = ServeOptions(**{**fields, "ranks": fields["ranks"] or 1, "http": http})
    options.check()
    assert options.folder.is_dir()


@pytest.mark.nightly
@pytest.mark.parametrize("block", [b for b in ALL if b.kind == "nightly"], ids=lambda b: b.place)
def test_slow_blocks_run(block: Block, engine: Path, server: Server, tmp_path: Path) -> None:
    """With the installed program."""
    folder = scratch(tmp_path, engine, with_engine=True)
    printed = run(for_server(block.text, server), folder, Path(sys.executable).parent)
    check_output(output_of(block.page, block), printed)


@pytest.mark.nightly
@pytest.mark.parametrize("block", [b for b in ALL if b.language == "python"], ids=lambda b: b.place)
def test_python_runs(block: Block, engine: Path, server: Server, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(for_server(block.text, server))
    folder = scratch(tmp_path, engine, with_engine=True)
    assert run(f"python {tmp_path}/block.py", folder, Path(sys.executable).parent).strip()


@pytest.mark.nightly
@pytest.mark.mpi
@pytest.mark.parametrize("block", [b for b in ALL if b.kind.endswith("serve")], ids=lambda b: b.place)
def test_servers_start_and_end(block: Block, engine: Path, tmp_path: Path) -> None:
    """As documented: SIGTERM to the frontend ends it in order."""
    folder = scratch(tmp_path, engine, with_engine=True)
    port = free_port()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = environment.for_mpirun() | {"OMP_NUM_THREADS": "1", "PATH": path}
    command = f"exec {block.text.partition('#')[0].strip()} --port {port}"
    process = subprocess.Popen(["bash", "-c", command], cwd=folder, env=env, start_new_session=True)
    try:
        ask = f"curl -sf 127.0.0.1:{port}/readyz"
        wait_until(lambda: subprocess.run(ask, shell=True).returncode == 0, START_S, "ready")
        children = psutil.Process(process.pid).children(recursive=True)
        frontends = [child.pid for child in children if "splash_trt.frontend.main" in child.cmdline()]
        os.kill(frontends[0] if frontends else process.pid, signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_every_output_follows_what_prints_it() -> None:
    for page in PAGES:
        before = None
        for block in blocks(page):
            if block.kind.startswith("output"):
                assert before is not None and before.kind in ("test", "nightly"), f"{block.place}: output of nothing"
            before = block


def test_the_comparison_can_fail() -> None:
    shown = Block(ROOT / "README.md", 1, "json", "output", '{"a": 1, "b": ["x"]}')
    check_output(shown, '{"a": 2.5, "b": ["y", "z"]}')
    for wrong in ('{"a": 1}', '{"a": 1, "b": []}', '{"a": "1", "b": ["x"]}', '{"a": 1, "b": ["x"], "c": 0}'):
        with pytest.raises(AssertionError):
            check_output(shown, wrong)
    text = Block(ROOT / "README.md", 1, "text", "output", "rows 12\n…\nwrote a…")
    check_output(text, "rows    7\nmore\nwrote abc")
    for wrong in ("rows 7", "wrote abc\nrows 7", "row 7\nwrote abc"):
        with pytest.raises(AssertionError):
            check_output(text, wrong)
    with pytest.raises(AssertionError):
        check_output(None, '{"error": {"message": "no"}}')
