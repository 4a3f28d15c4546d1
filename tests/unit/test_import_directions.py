"""scripts/check_imports.py finds each kind of planted violation, and finds none in what is allowed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_imports.py"


def check(root: Path, files: dict[str, str]) -> tuple[int, list[str]]:
    """Writes ``files`` below ``root`` and runs the script there. Returns its exit code and its violations."""
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    run = subprocess.run([sys.executable, str(SCRIPT), str(root)], capture_output=True, text=True, timeout=60)
    assert run.stderr == ""
    lines = [line.removeprefix(f"{root}/") for line in run.stdout.splitlines()]
    assert lines[-1].startswith(f"{len(lines) - 1} violation(s)")
    return run.returncode, lines[:-1]


def lines_of_function(num_lines: int) -> str:
    return "def f() -> None:\n" + "    pass\n" * (num_lines - 1)


CLEAN = {
    "splash_trt/__init__.py": "def __getattr__(name):\n    from splash_trt.llm import LLM\n    return LLM\n",
    "splash_trt/llm.py": "import splash_trt.worker\n",
    "splash_trt/worker.py": "import torch\nfrom splash_trt.dist import control\nimport splash_engines.ops\n",
    "splash_trt/environment.py": "import os\nHOME = os.environ['HOME']\n",
    "splash_trt/plan.py": "import numpy\n",
    "splash_trt/dist/__init__.py": "",
    "splash_trt/dist/control.py": "def start():\n    from mpi4py import MPI\n    return MPI\n",
    "splash_trt/scheduler/__init__.py": "from splash_trt.scheduler.queue import Queue\n",
    "splash_trt/scheduler/queue.py": (
        "from typing import TYPE_CHECKING\nfrom splash_trt import plan\nfrom ..plan import Plan\n"
        "if TYPE_CHECKING:\n    import torch\nclass Queue: pass\n"
    ),
    "splash_trt/models/config.py": "",
    "splash_trt/weights/store.py": "import torch\nfrom splash_trt.models.config import ModelConfig\n",
    "engines/ops.py": "import torch\n" + lines_of_function(60),
    "plugins/lse_merge/kernel.py": "def launch():\n    import triton\n    return triton\n",
    "tests/unit/test_ops.py": "def test():\n    import os\n    import splash_engines\n    os.environ['A'] = '1'\n",
}


def test_allowed_imports_pass(tmp_path: Path) -> None:
    assert check(tmp_path, CLEAN) == (0, [])


def test_missing_folders_pass(tmp_path: Path) -> None:
    assert check(tmp_path, {}) == (0, [])


PLANTED = {
    "upward": (
        {"splash_trt/plan.py": "import numpy\nfrom splash_trt.dist import control\n"},
        "splash_trt/plan.py:2: splash_trt.plan (layer 0) must not import splash_trt.dist.control (layer 2)",
    ),
    "upward to a module that does not exist yet": (
        {"splash_trt/plan.py": "from splash_trt.runtime.device_runner import DeviceRunner\n"},
        "splash_trt/plan.py:1: splash_trt.plan (layer 0) must not import splash_trt.runtime.device_runner.DeviceRunner",
    ),
    "upward and relative": (
        {"splash_trt/dist/control.py": "from ..worker import Worker\n"},
        "splash_trt/dist/control.py:1: splash_trt.dist.control (layer 2) must not import splash_trt.worker (layer 5)",
    ),
    "upward for type checkers": (
        {"splash_trt/plan.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import splash_trt.worker\n"},
        "splash_trt/plan.py:3: splash_trt.plan (layer 0) must not import splash_trt.worker (layer 5)",
    ),
    "upward inside one package": (
        {"splash_trt/cache/pool.py": "from .storage import Storage\n", "splash_trt/cache/storage.py": ""},
        "splash_trt/cache/pool.py:1: splash_trt.cache.pool (layer 1) must not import splash_trt.cache.storage",
    ),
    "upward from the engines": (
        {"engines/ops.py": "import splash_trt.runtime.device_runner\n"},
        "engines/ops.py:1: splash_engines.ops (layer 3) must not import splash_trt.runtime.device_runner (layer 4)",
    ),
    "module without a layer": (
        {"splash_trt/misc.py": ""},
        "splash_trt/misc.py:1: splash_trt.misc has no layer",
    ),
    "engines by its folder": (
        {"plugins/x.py": "from engines.ops import embed\n"},
        "plugins/x.py:1: import splash_engines, not engines",
    ),
    "plugins by its folder, in a test": (
        {"tests/unit/test_x.py": "import pytest\nimport plugins.lse_merge\n"},
        "tests/unit/test_x.py:2: import splash_plugins, not plugins",
    ),
    "engines by importlib": (
        {"tests/unit/test_x.py": "import importlib\nimportlib.import_module('engines.ops')\n"},
        "tests/unit/test_x.py:2: import splash_engines, not engines",
    ),
    "torch in the scheduler": (
        {"splash_trt/scheduler/policy.py": "import math\nfrom torch import nn\n"},
        "splash_trt/scheduler/policy.py:2: splash_trt.scheduler.policy must not load torch: "
        "splash_trt.scheduler.policy -> torch",
    ),
    "torch through a module": (
        {"splash_trt/scheduler/policy.py": "\nimport splash_trt.plan\n", "splash_trt/plan.py": "import torch\n"},
        "splash_trt/scheduler/policy.py:2: splash_trt.scheduler.policy must not load torch: "
        "splash_trt.scheduler.policy -> splash_trt.plan -> torch",
    ),
    "torch through a package around it": (
        {"splash_trt/scheduler/__init__.py": "import torch\n"},
        "splash_trt/scheduler/queue.py:1: splash_trt.scheduler.queue must not load torch: "
        "splash_trt.scheduler.queue -> splash_trt.scheduler -> torch",
    ),
    "cycle": (
        {"splash_trt/config.py": "import splash_trt.link\n", "splash_trt/link.py": "import splash_trt.config\n"},
        "import cycle: splash_trt.config -> splash_trt.link -> splash_trt.config",
    ),
    "cycle through a package": (
        {"splash_trt/scheduler/queue.py": "from splash_trt.scheduler import Queue\n"},
        "import cycle: splash_trt.scheduler -> splash_trt.scheduler.queue -> splash_trt.scheduler",
    ),
    "import inside a function": (
        {"splash_trt/plan.py": "def f():\n    import numpy\n"},
        "splash_trt/plan.py:2: numpy is imported inside a function",
    ),
    "import inside a method": (
        {"engines/ops.py": "class A:\n    async def f(self):\n        from splash_plugins.a import b\n"},
        "engines/ops.py:3: splash_plugins.a.b is imported inside a function",
    ),
    "os.environ": (
        {"engines/ops.py": "import os\nX = os.environ.get('X')\n"},
        "engines/ops.py:2: only splash_trt.environment reads the environment",
    ),
    "getenv by name": (
        {"engines/ops.py": "from os import getenv\n"},
        "engines/ops.py:1: only splash_trt.environment reads the environment",
    ),
    "long file": (
        {"engines/ops.py": "X = 1\n" * 401},
        "engines/ops.py:401: file has 401 lines, more than 400",
    ),
    "long test": (
        {"tests/unit/test_x.py": "X = 1\n" * 401},
        "tests/unit/test_x.py:401: file has 401 lines, more than 400",
    ),
    "long function": (
        {"engines/ops.py": "\n" + lines_of_function(61)},
        "engines/ops.py:2: function f has 61 lines, more than 60",
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_violation_is_found(tmp_path: Path, planted: str) -> None:
    files, expected = PLANTED[planted]
    code, violations = check(tmp_path, {**CLEAN, **files})
    assert code == 1
    assert [violation for violation in violations if expected in violation], violations
