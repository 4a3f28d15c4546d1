"""Sampling noise that depends on (request seed, position, token id) and on nothing else.

A row's key is hashed from its seed and position; id i then gets output i of the splitmix64 stream that starts at the
key (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014). So whoever holds an id computes
its noise alone, and the integers are the same on every device, in every batch and in every cut of the vocabulary.

S rows, V ids. Unsigned 64-bit arithmetic is done in int64, which wraps.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
_UNIFORM_BITS = 52  # one bit below float64's precision, so that the half added to them fits and 1.0 is never reached


def _xor_shifted(x: Tensor, bits: int) -> Tensor:
    """x ^ (x >>> bits), in place. The mask removes the sign that an arithmetic shift drags in."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def mix64(x: Tensor) -> Tensor:
    """splitmix64's finaliser: a bijection of int64 in which each input bit moves each output bit. Overwrites x."""
    x = _xor_shifted(x, 30).mul_(_MULTIPLIERS[0])
    x = _xor_shifted(x, 27).mul_(_MULTIPLIERS[1])
    return _xor_shifted(x, 31)


def row_keys(seed: Tensor, position: Tensor) -> Tensor:
    """[S] int64 from seed [S] int64 and position [S] int64 (the position that the drawn token will take)."""
    return mix64(mix64(seed + GAMMA).add_((position + 1) * GAMMA))


def id_steps(first_id: int, num_ids: int, device: torch.device) -> Tensor:
    """[num_ids] int64: what ids first_id … add to a row's key; the same for all rows, so a caller keeps it."""
    return torch.arange(first_id + 1, first_id + num_ids + 1, dtype=torch.int64, device=device).mul_(GAMMA)


def hashes(keys: Tensor, steps: Tensor) -> Tensor:
    """[S, V] int64, uniform over all 64-bit values, from row_keys [S] and id_steps [V]."""
    return mix64(keys[:, None] + steps)


def uniform(bits: Tensor) -> Tensor:
    """float64 strictly between 0 and 1, from `hashes`: the middle of one of 2**52 equal cells."""
    top = (bits >> (64 - _UNIFORM_BITS)).bitwise_and_((1 << _UNIFORM_BITS) - 1)
    return top.to(torch.float64).add_(0.5).mul_(2.0**-_UNIFORM_BITS)


def gumbel(keys: Tensor, steps: Tensor) -> Tensor:
    """[S, V] float64 of the standard Gumbel distribution, between -3.7 and 36.8.

    The argmax of logit + gumbel is distributed as softmax(logit). float64 whatever the logits are: in float32 two ids
    of a large vocabulary would often draw the same noise.
    """
    return uniform(hashes(keys, steps)).log_().neg_().log_().neg_()
