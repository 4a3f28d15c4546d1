"""Lets a kernel start while the one before it ends (programmatic dependent launch, NVIDIA from compute capability 9.0).

A kernel that is launched in this way may start before its inputs are written. So it first loads only what no kernel of
a step writes (weights, a step's index arrays), then waits for the kernels before it (wait_for_inputs), then reads and
writes the rest. Every program has to wait, even one with nothing to do: the kernel after this one takes this one's end
for the end of all kernels before it.

So whatever writes weights, block tables or index arrays must be done before the first kernel of a step that is launched
in this way. It is: an upload, a copy or a kernel that waits as usual (the ranks' meeting, the embedding) lies between.

A kernel starts only when every program of the one before it has either called launch_dependents or ended, so all of
them have started. Programs that wait therefore never take a place on the GPU that an earlier kernel still needs, even
if that one waits for other ranks (plugins/peer_rows).
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Waits until all kernels before this one are done; then lets the next kernel start, up to its own wait.

    Not sooner: waiting programs would occupy places in which other kernels still have to start programs, and the
    kernel after next would be crowded onto the few multiprocessors that have room.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


# What it is worth: perf/kernels_decode.py.
BY_DEFAULT = True


def overlap(tensor: torch.Tensor, *, after_join: bool = False) -> dict[str, bool]:
    """Options of a launch on the device of `tensor`: the kernel's OVERLAP and, where the device supports it, Triton's
    `launch_pdl`.

    after_join: this launch may be the first one after its stream has waited for another stream. Then there are several
    kernels before it, and it starts as usual, when all of them are done (its wait returns at once); the next kernel may
    still start while it ends.
    """
    if not BY_DEFAULT:
        return {"OVERLAP": False}
    if not tensor.is_cuda or torch.version.hip is not None:
        return {"OVERLAP": False}
    if torch.cuda.get_device_capability(tensor.device) < (9, 0):
        return {"OVERLAP": False}
    return {"OVERLAP": True} if after_join else {"OVERLAP": True, "launch_pdl": True}
