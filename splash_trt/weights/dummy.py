"""Random weights, generated on the device that uses them: the same numbers on any device, however tensors are cut."""

from __future__ import annotations

import hashlib
import math

import torch

from splash_trt.models.config import ModelConfig
from splash_trt.weights.spec import TensorSpec

CPU_CHUNK = 1 << 16  # elements at a time, so that two int64 buffers stay in a core's cache
DEVICE_CHUNK = 1 << 24

_TABLE_BITS = 16
# Weyl step and multipliers of splitmix64's finaliser (Steele, Lea, Flood, OOPSLA 2014), as signed 64-bit numbers.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


class DummyWeights:
    """A WeightSource of random numbers: norms are 1, biases 0, matrices normally distributed with variance 1 / fan-in.

    An element depends only on the seed, its tensor's name and its index in the whole tensor: a 64-bit hash of these
    chooses one of 2^16 quantiles of the normal distribution (so no value is beyond 4.33 standard deviations).
    ValueError for a seed that is no whole number from 0.
    """

    def __init__(self, model: ModelConfig, seed: int = 0) -> None:
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            raise ValueError(f"dummy_weights: {seed!r} is not a seed, which is a whole number from 0")
        self.model = model
        self.seed = seed
        size = 1 << _TABLE_BITS
        middles = (torch.arange(size, dtype=torch.float64) + 0.5) * (2 / size) - 1
        self._quantiles = torch.erfinv(middles) * math.sqrt(2)

    def read(self, spec: TensorSpec, begin: int, end: int, out: torch.Tensor) -> None:
        """Rows [begin, end) of the tensor along spec.axis; see WeightSource."""
        assert 0 <= begin <= end <= spec.shape[spec.axis], (spec.name, begin, end)
        assert out.shape == (*spec.shape[: spec.axis], end - begin, *spec.shape[spec.axis + 1 :]), (spec, out.shape)
        if spec.name.endswith("norm"):
            out.fill_(1.0)
        elif spec.name.endswith("_bias"):
            out.zero_()
        elif out.numel():
            table = (self._quantiles * _fan_in(spec) ** -0.5).to(out.dtype).to(out.device)
            self._fill(spec, begin, out, table)

    def _fill(self, spec: TensorSpec, begin: int, out: torch.Tensor, table: torch.Tensor) -> None:
        """Fills `out` as [rows, width]: in the whole tensor each row is contiguous, and the rows are `stride` apart."""
        inner = math.prod(spec.shape[spec.axis + 1 :])
        stride = spec.shape[spec.axis] * inner
        target = out.view(math.prod(spec.shape[: spec.axis]), -1)
        rows, width = target.shape
        chunk = CPU_CHUNK if out.device.type == "cpu" else DEVICE_CHUNK
        columns = min(width, chunk)
        steps = torch.arange(columns, device=out.device) * _STEP
        starts = (torch.arange(rows, device=out.device) * stride + begin * inner) * _STEP + _key(self.seed, spec.name)
        step = max(1, chunk // columns)
        for row in range(0, rows, step):
            for column in range(0, width, columns):
                size = min(columns, width - column)
                offset = starts[row : row + step, None] + _signed(column * _STEP)
                index = _hash(offset + steps[:size]).flatten()
                part = target[row : row + step, column : column + size]
                part.copy_(table.index_select(0, index).view(part.shape))


def _fan_in(spec: TensorSpec) -> int:
    """How many products one output sums. The output projection is stored transposed, [H, v, D]."""
    return spec.shape[0] * spec.shape[1] if spec.name.endswith(".o") else spec.shape[-1]


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _signed(value: int) -> int:
    """value modulo 2^64, as a signed 64-bit number."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _hash(x: torch.Tensor) -> torch.Tensor:
    """The upper 16 bits of splitmix64's finaliser, whose last shift is omitted, as it does not change them. Overwrites
    x (int64)."""
    for shift, multiplier in ((30, _MIX_1), (27, _MIX_2)):
        # int64 shifts keep the sign: the mask makes them logical.
        x ^= (x >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        x *= multiplier
    return (x >> (64 - _TABLE_BITS)).bitwise_and_((1 << _TABLE_BITS) - 1)
