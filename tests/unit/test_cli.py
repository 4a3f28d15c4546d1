"""The command line before anything runs: what it lists, and what listing does not load."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from splash_engines.tensorrt.plans import PlanSettings
from splash_trt.cli import EXIT_INTERRUPTED, main
from splash_trt.commands.group import COMMANDS, commands
from splash_trt.config import DTYPES, format_of

LOOK = """
import json, sys, tempfile
from click.shell_completion import BashComplete
from splash_trt.commands.group import commands

def invoke(*arguments):
    try:
        commands.main(list(arguments), prog_name="splash-trt", standalone_mode=False)
    except SystemExit:
        pass

def complete(arguments, incomplete):
    shell = BashComplete(commands, {}, "splash-trt", "_SPLASH_TRT_COMPLETE")
    assert shell.get_completions(arguments, incomplete)

%s
print(json.dumps([name for name in sys.argv[1:] if name in sys.modules]))
"""
MODEL = Path(__file__).parents[2] / "models" / "splash-tiny"
LOAD = "rollouts:prompts=2,samples=1,prompt_tokens=20,output_max=20"
SIMULATE = f'''
invoke("simulate", "--model", "{MODEL}", "--device", "h100", "--ranks", "2", "--memory", "64M", "--trace", "{LOAD}",
       "--layouts", "dp", "--max-batch-tokens", "512", "--max-running", "16")
'''


@pytest.mark.parametrize(
    "acts",
    [
        'invoke("--help")',
        'invoke("--version")',
        'complete([], "")',
        "\n".join(f'complete(["{name}"], "--"); invoke("{name}", "--help")' for name in COMMANDS),
        f'invoke("capacity", "--model", "{MODEL}", "--memory", "64M", "--ranks", "2")',
        SIMULATE,
        'try: invoke("top", "--once", "--url", "http://127.0.0.1:1")\nexcept Exception as error: print(error)',
        'invoke("triton-repo", "--out", tempfile.mkdtemp(), "--endpoint", "ipc:///not/there")',
    ],
    ids=["help", "version", "completed", "options", "capacity", "simulate", "top", "triton-repo"],
)
def test_it_loads_no_torch(acts: str) -> None:
    heavy = ["torch", "transformers", "mpi4py"]
    done = subprocess.run([sys.executable, "-c", LOOK % acts, *heavy], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_listing_commands_loads_none_of_them() -> None:
    acts = 'invoke("--help"); complete([], "")'
    modules = sorted({entry.place.partition(":")[0] for entry in COMMANDS.values()})
    done = subprocess.run([sys.executable, "-c", LOOK % acts, *modules], capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout.splitlines()[-1]) == [], done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_said_of_a_command_is_what_it_says(name: str) -> None:
    entry, command = COMMANDS[name], COMMANDS[name].load()
    text = " ".join((command.help or "").split())
    assert text.startswith(entry.help) and entry.help.endswith(".")
    assert (command.name, command.hidden) == (name, entry.hidden)
    assert commands.get_command(click.Context(commands), name) is command


def test_help_lists_all_but_the_hidden() -> None:
    text = CliRunner().invoke(commands, ["--help"]).output
    listed = [line.split()[0] for line in text.partition("Commands:")[2].splitlines() if line[2:3].strip()]
    assert listed == sorted(name for name, entry in COMMANDS.items() if not entry.hidden)


def test_an_unknown_command_is_refused() -> None:
    result = CliRunner().invoke(commands, ["sevre"])
    assert result.exit_code == 2 and "No such command 'sevre'" in result.output


def number_options() -> list[tuple[str, str]]:
    """(command, option) of all that take a number which need not be whole."""
    found = []
    for name, entry in COMMANDS.items():
        for parameter in entry.load().params:
            if isinstance(parameter.type, click.types.FloatParamType):
                found.append((name, parameter.opts[0]))
    return found


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "0", "1e300"])
@pytest.mark.parametrize(("command", "option"), number_options())
def test_numbers_are_held_against_their_range(command: str, option: str, value: str) -> None:
    """Before anything else that is missing or wrong."""
    result = CliRunner().invoke(commands, [command, f"{option}={value}"], standalone_mode=False)
    assert isinstance(result.exception, click.ClickException)
    said = result.exception.format_message()
    assert option in said and re.search(r"(to|at most) \d+$", said), said


LONG = "x" * 100_000
PLANNED = ["--model", str(MODEL), "--ranks", "2"]


@pytest.mark.parametrize(
    ("arguments", "begin", "end"),
    [
        (["capacity", *PLANNED, "--device", LONG], "--device: 'xx", "nor a file; splash-trt calibrate writes"),
        (["capacity", *PLANNED, "--memory", LONG], "Invalid value for '--memory': 'xx", "such as 4G"),
        (["simulate", *PLANNED, "--device", "h100", "--trace", LONG], "--trace: 'xx", "nor one of rollouts, agents"),
        (["inspect", LONG], "xx", "x: is not a folder; give the folder that splash-trt build wrote"),
        (["serve", "--engine", LONG], "xx", "x: is not a folder; give the folder that splash-trt build wrote"),
        ([LONG], "No such command 'xx", "x'."),
    ],
    ids=["device", "memory", "trace", "inspect", "serve", "command"],
)
def test_a_long_value_is_quoted_in_short(
    arguments: list[str], begin: str, end: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["splash-trt", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and len(said) < 900
    assert said.startswith(f"splash-trt: {begin}") and end in said and "x … x" in said


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
from splash_trt.cli import main

class Interrupts:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "%s":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts)
main()
"""


@pytest.mark.parametrize("module", ["click", "splash_trt.simulate.command", "splash_trt.simulate.generators"])
def test_ctrl_c_during_imports_is_one_line(module: str) -> None:
    program = [sys.executable, "-c", INTERRUPTED % module, "simulate", "--help"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_INTERRUPTED
    assert done.stdout == "" and done.stderr.strip() == "splash-trt: interrupted"


def test_a_second_ctrl_c_at_the_end_changes_nothing() -> None:
    """Clearing away what was loaded takes a moment, with torch more than one, and Python then has no handler left."""
    late = """
import atexit, sys
atexit.register(signal.raise_signal, signal.SIGINT)

class Late:
    def __del__(self, interrupt=signal.raise_signal):
        interrupt(2)

sys.modules["late"] = Late()
main()
"""
    program = [sys.executable, "-c", INTERRUPTED.replace("\nmain()\n", late) % "click", "simulate", "--help"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_INTERRUPTED, done.stderr
    assert done.stdout == "" and done.stderr.strip() == "splash-trt: interrupted"


@pytest.mark.parametrize("then", ["", "raise ImportError('half imported')"])
def test_ctrl_c_that_an_import_forgets_is_remembered(then: str) -> None:
    """As torch's C code does with what is raised while it imports numpy."""
    forgets = f"""
        if name == "splash_trt.simulate.command":
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                {then or "pass"}
"""
    at = INTERRUPTED.index("        if name")
    program = INTERRUPTED[:at] + forgets.lstrip("\n") + INTERRUPTED[INTERRUPTED.index("\nsys.meta_path") :]
    command = [sys.executable, "-c", program, "simulate", *PLANNED, "--device", "h100", "--trace", LOAD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_INTERRUPTED, done.stderr
    assert done.stdout == "" and done.stderr.strip() == "splash-trt: interrupted"


def test_every_command_takes_the_short_names_of_types() -> None:
    for name in ("build", "calibrate", "capacity", "serve", "simulate"):
        (option,) = (parameter for parameter in COMMANDS[name].load().params if parameter.name == "dtype")
        assert isinstance(option.type, click.Choice) and "bf16" in option.type.choices, name


def test_build_offers_the_types_that_networks_are_built_in() -> None:
    """A checkpoint may have another one, which is then refused."""
    (option,) = (parameter for parameter in COMMANDS["build"].load().params if parameter.name == "dtype")
    assert isinstance(option.type, click.Choice)
    for name in option.type.choices:
        assert PlanSettings(targets=("sm_89",), ranks=(1,), dtype=format_of(name)).dtype in DTYPES
    with pytest.raises(ValueError, match="^dtype: 'float64' is none that networks are built in; give float32 or bf"):
        PlanSettings(targets=("sm_89",), ranks=(1,), dtype="float64")
