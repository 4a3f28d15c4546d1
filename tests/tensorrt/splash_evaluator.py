"""`splash-trt` whose ranks run on evaluated networks: python splash_evaluator.py MODEL DTYPE serve --engine …"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from splash_engines.tensorrt.graph import Graph  # noqa: E402
from splash_engines.tensorrt.segments import Lowering  # noqa: E402
from splash_engines.tensorrt.sizes import Sizes  # noqa: E402
from splash_trt.cli import main  # noqa: E402
from splash_trt.models.families import load_config  # noqa: E402
from tests.tensorrt.evaluated import Networks, evaluator  # noqa: E402


def lower(lowering: Lowering, kind: str, sizes: Sizes, heads: int) -> Graph | None:
    """For the log, so that a test sees that networks are what runs."""
    sys.stderr.write(f"evaluator: lowers {kind}\n")
    return lowering(kind, sizes, heads)


if __name__ == "__main__":
    model, dtype = load_config(Path(sys.argv.pop(1))), getattr(torch, sys.argv.pop(1))
    with evaluator(Networks(model, dtype, lower=lower)):
        main()
