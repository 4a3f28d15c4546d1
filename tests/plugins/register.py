"""A program: registers all plugins over one version's sources, builds each layer, and prints what came of it as JSON.

`python -m tests.plugins.register BINDINGS DTYPE CAPABILITY…`. In a process of its own, since TensorRT registers a
plugin once in a process, and a process whose Triton interprets kernels cannot compile them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import triton

from splash_plugins import aot
from splash_plugins.registrations import register_all
from tests.oracles.tensorrt_stub import DataType, PluginLayer, install
from tests.plugins.layers import LAYERS_TESTED, Layer, sizes_of

DTYPES = {
    "float32": DataType.FLOAT,
    "float16": DataType.HALF,
    "bfloat16": DataType.BF16,
    "int32": DataType.INT32,
    "int64": DataType.INT64,
}
TOKENS = (1, 13)


def build(layer: Layer, rows: str) -> PluginLayer:
    inputs = [(dims, DTYPES[rows if dtype == "rows" else dtype]) for dims, dtype in layer.inputs.values()]
    return PluginLayer(layer.plugin, inputs, layer.attributes)


def assembled(ptx: str, arch: str) -> str:
    """What NVIDIA's assembler, which Triton brings, says against the PTX; empty: nothing."""
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(assembler), f"-arch={arch}", file.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def line_of(ptx: str, directive: str) -> str:
    return next(line.split()[1] for line in ptx.splitlines() if line.startswith(directive))


def main(bindings: str, rows: str, capability: str) -> None:
    install(Path(bindings))
    register_all(aot.target_of((int(capability) // 10, int(capability) % 10)))
    for layer in LAYERS_TESTED:
        built = build(layer, rows)
        arch = line_of(built.ptx, ".target")
        print(
            json.dumps(
                {
                    "plugin": layer.plugin,
                    "types": [t.name for t in built.output_types],
                    "aliases": built.aliases,
                    "shapes": {t: built.output_shapes(sizes_of(t)) for t in TOKENS},
                    "launches": {t: asdict(built.launch(sizes_of(t))) for t in TOKENS},
                    "kernel": built.kernel_name,
                    "parameters": [[t, pointer] for _, t, pointer in aot.parameters(built.ptx)],
                    "version": line_of(built.ptx, ".version"),
                    "arch": arch,
                    "assembler": assembled(built.ptx, arch),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
