"""Makes Triton interpret kernels where there is no GPU; where there is one, they run on it.

Triton reads TRITON_INTERPRET when a kernel, those of its own library included, is defined. What was imported before,
by tests collected earlier, is therefore forgotten, so that this folder's tests import it again; whoever imported it
keeps what they have. Triton's own extension module stays: it can be loaded only once, and does not look.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):
        is_triton = name == "triton" or (name.startswith("triton.") and not name.startswith("triton._C"))
        is_kernel = name.startswith("splash_plugins.") and name.rpartition(".")[2].endswith("kernel")
        if is_triton or is_kernel:
            del sys.modules[name]
        if is_kernel:  # which `from package import kernel` would still find in its package
            package, _, module = name.rpartition(".")
            delattr(sys.modules[package], module)


def index_by_item() -> None:
    """Lets numpy >= 2.4 bound an interpreted loop: it takes no array of one element (a scalar there) for one."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


if DEVICE == "cpu":
    interpret()
    index_by_item()
torch.set_num_threads(1)


@pytest.fixture
def device() -> str:
    return DEVICE
