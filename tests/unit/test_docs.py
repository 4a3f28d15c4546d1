"""What the documentation names is there, and what is there is documented."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from click.shell_completion import BashComplete

from splash_trt.commands.group import COMMANDS, commands
from splash_trt.config import Layout
from splash_trt.layout.spec import SPECS, Residency
from splash_trt.migration.diff import Sizes
from splash_trt.scheduler.transition import row_traffic, weight_traffic
from tests.e2e.doc_pages import KINDS, NO_TEST, PAGES, ROOT, anchors, blocks, links

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
OTHERS_FLAGS = {
    "mpirun": "--oversubscribe --bind-to --mca --hostfile --map-by --prefix",
    "srun": "--mpi --kill-on-bad-exit",
    "sbatch": "--job-name --nodes --ntasks-per-node --cpus-per-task --time --signal",
    "tritonserver": "--http-port --grpc-port --metrics-port --exit-timeout-secs --model-control-mode --load-model",
    "guidellm": "--output --profile --constraint --backend --tokenizer --data",
    "pip": "--no-deps",
    "every command": "--help",
    "python -m perf": "--ranks --dtypes --batches --contexts --results --threads",
}
PAGES_OF = {
    "build": ("build.md",),
    "calibrate": ("policy.md",),
    "capacity": ("simulate.md",),
    "inspect": ("build.md",),
    "serve": ("serve.md",),
    "simulate": ("simulate.md",),
    "top": ("tuning.md",),
    "triton-repo": ("triton.md",),
}


def options_of(command: click.Command) -> set[str]:
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    return {name for parameter in shown for name in parameter.opts if name.startswith("--")}


ALL_COMMANDS = {name: entry.load() for name, entry in COMMANDS.items()}


def visible() -> dict[str, click.Command]:
    return {name: command for name, command in ALL_COMMANDS.items() if not command.hidden}


def splash_lines(text: str) -> list[str]:
    """Command lines that begin with `splash-trt`, or are an mpirun's program, with continued lines joined."""
    joined = re.sub(r"\\\n", " ", text)
    found = re.finditer(r"^(?:.* )?(splash-trt [a-z].*)$", joined, re.MULTILINE)
    return [line[1] for line in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and target.is_relative_to(ROOT), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}; there are {sorted(anchors(target))}"


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {link.partition("#")[0] for link in links(index)}
    assert {page.name for page in PAGES if page.parent == index.parent} - {index.name} <= listed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_bash_says_how_it_is_tested(page: Path) -> None:
    for block in blocks(page):
        if block.language == "bash":
            known = block.kind in KINDS or (block.kind.startswith(NO_TEST) and len(block.kind) > len(NO_TEST) + 4)
            assert known, f"{block.place}: {block.kind!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_that_is_named_exists(page: Path) -> None:
    known = {flag for flags in OTHERS_FLAGS.values() for flag in flags.split()}
    known |= {flag for command in ALL_COMMANDS.values() for flag in options_of(command)}
    unknown = set(FLAG.findall(page.read_text(encoding="utf-8"))) - known
    assert not unknown, f"{page.name} names {sorted(unknown)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_command_lines_have_their_own_commands_flags(page: Path) -> None:
    for block in blocks(page):
        for line in splash_lines(block.text) if block.language in ("bash", "") else ():
            _, name, *arguments = shlex.split(line.rstrip(" &"), comments=True)
            flags = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
            assert flags <= options_of(ALL_COMMANDS[name]) | {"--help"}, f"{block.place}: {line}"


def test_every_command_and_flag_is_documented() -> None:
    """On the page that the command belongs to, or on one that this page links to for it."""
    assert set(PAGES_OF) == set(visible())
    docs = ROOT / "docs"
    for name, pages in PAGES_OF.items():
        near = {docs / page for page in pages}
        near |= {docs / link.partition("#")[0] for page in pages for link in links(docs / page) if "/" not in link}
        text = "".join(page.read_text(encoding="utf-8") for page in near if page.is_file())
        assert f"splash-trt {name}" in text
        missing = options_of(visible()[name]) - set(FLAG.findall(text)) - {"--help"}
        assert not missing, f"{name}: {sorted(missing)} on none of {sorted(page.name for page in near)}"


def test_simulate_s_own_defaults_are_as_its_page_says() -> None:
    """Where it has the same options as `serve` with other defaults."""
    page = (ROOT / "docs" / "simulate.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith("| `--max-batch-tokens`"))
    defaults = {parameter.name: parameter.default for parameter in ALL_COMMANDS["simulate"].params}
    assert f"by default {defaults['max_batch_tokens']}, {defaults['max_running']} and the model's" in row


FILLED_IN = re.compile(
    r"…|'[^']*'|[\w.:-]*\d[\w.:]*|--[a-z-]+:?|\bN\b|\bdp\b|\bSIG[A-Z]+|\b[a-z]+\.json\b|the frontend"
    r"|Address already in use"
)
OTHERS_MESSAGES = (
    "foo: Object contains unknown field",
    "mpirun has detected an attempt to run as root",
    "There are not enough slots available",
)


def program_texts() -> str:
    """Every text in the sources, with what is filled in left out as …"""
    found = []
    for package in ("splash_trt", "engines"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                    found.append("".join(str(part) for part in parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def test_messages_are_those_of_the_program() -> None:
    """In troubleshooting.md's tables, as far as nothing is filled into them."""
    page = ROOT / "docs" / "troubleshooting.md"
    rows = [line.split(" | ")[0] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row) if " " in message]
    assert len(messages) > 30
    texts = program_texts()
    unknown = [
        (message, part.strip())
        for message in messages
        if message not in OTHERS_MESSAGES
        for part in FILLED_IN.split(message)
        if len(part.strip()) >= 8 and part.strip(" ;:,(") not in texts
    ]
    assert not unknown, unknown


def test_what_a_switch_moves_is_what_the_table_says() -> None:
    """layouts.md's table against the rules that the policy reckons with."""
    text = (ROOT / "docs" / "layouts.md").read_text(encoding="utf-8")
    table = text[text.index("| from") :].splitlines()
    targets = [Layout.parse(name.strip()) for name in table[0].split("|")[2:-1]]
    rows = np.array([64.0, 0.0, 64.0])
    pages = dict.fromkeys(Residency, (4, 4, 4))
    sizes = Sizes(page_tokens=64, row_bytes=1, itemsize=1, heads=(1, 1, 1), head_numbers=(1,), pages=pages)
    for line in table[2 : 2 + len(Layout)]:
        name, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        source = SPECS[Layout.parse(name)]
        for layout, cell in zip(targets, cells, strict=True):
            target = SPECS[layout]
            heads = weight_traffic(source.residency, target.residency, sizes).sent.any()
            cache = row_traffic(source.placement, target.placement, rows, 1).sent.sum() / rows.sum()
            assert ("heads" in cell) == heads, f"{name} to {layout.name}: {cell}"
            expected = 2 if "to all" in cell else 2 / 3 if "one page in N" in cell else 0
            same_ranks = cell == ""
            assert same_ranks or abs(cache - expected) < 1e-9, f"{name} to {layout.name}: {cell}, {cache}"


def completed(arguments: list[str], incomplete: str) -> set[str]:
    shell = BashComplete(commands, {}, "splash-trt", "_SPLASH_TRT_COMPLETE")
    return {item.value for item in shell.get_completions(arguments, incomplete)}


def test_commands_flags_and_choices_are_completed() -> None:
    assert completed([], "") == set(visible())
    assert completed([], "ca") == {"calibrate", "capacity"}
    assert completed(["serve"], "--max-b") == {"--max-batch-tokens", "--max-body-bytes"}
    assert completed(["serve", "--layout"], "d") == {"dp", "dop"}
    assert completed(["build", "--out", "x"], "--self") == {"--self-contained"}


def test_bash_completes_with_the_script_as_documented() -> None:
    """The installed program writes the script, and bash with it completes a command by asking the program again."""
    program = Path(sys.executable).parent / "splash-trt"
    bash = f"""
        source <(_SPLASH_TRT_COMPLETE=bash_source {program})
        complete -p splash-trt
        COMP_WORDS=(splash-trt tr) COMP_CWORD=1
        _splash_trt_completion {program}
        echo "${{COMPREPLY[@]}}"
    """
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", bash], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    registered, found = done.stdout.splitlines()
    assert registered.endswith("splash-trt") and found == "triton-repo"
