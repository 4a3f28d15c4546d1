"""Lets a kernel begin while the one before it ends (programmatic dependent launch, NVIDIA from compute capability 9.0).

A kernel launched so may run before what it reads is written: it first loads what no kernel of a step writes (weights,
a step's index arrays), then waits. Every program has to wait, also one with nothing to do: what comes next takes the
end of this kernel for the end of all before it. Nothing is written before the wait.

So whatever writes weights, block tables or index arrays must be done before the first kernel of a step that is launched
so. It is: an upload, a copy or a kernel that waits as usual (the ranks' meeting, the embedding) lies in between.

A kernel starts when all programs of the one before it have started, whether these let it in themselves or are done.
Programs that wait therefore never take a place that something before them still needs, also where what comes before
waits for other ranks (plugins/peer_rows).
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Until all kernels before this one are done; then lets the next one's programs come to their own wait.

    Not sooner: programs that only wait take the places of those that others still have to start, and crowd the next
    but one onto the processors that have room.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


# What it is worth: perf/kernels_decode.py.
BY_DEFAULT = True


def overlap(tensor: torch.Tensor, *, after_join: bool = False) -> dict[str, bool]:
    """A launch's options: the kernel's OVERLAP, and Triton's `launch_pdl` where the device knows it.

    after_join: the launch may be the first one after the stream has waited for another. It has several kernels before
    it then and begins when all are done, its own wait being none; but the next one may begin while it ends.
    """
    if not BY_DEFAULT:
        return {"OVERLAP": False}
    if not tensor.is_cuda or torch.version.hip is not None:
        return {"OVERLAP": False}
    if torch.cuda.get_device_capability(tensor.device) < (9, 0):
        return {"OVERLAP": False}
    return {"OVERLAP": True} if after_join else {"OVERLAP": True, "launch_pdl": True}
