"""Compressors to hold the demo model against: an interpolated Kneser-Ney byte 5-gram and xz.

Kneser-Ney after S. F. Chen and J. Goodman, "An empirical study of smoothing techniques for language modeling", 1999,
section 3.4: modified (three discounts an order) and interpolated down to the uniform distribution over 256 bytes.
"""

from __future__ import annotations

import lzma

import numpy as np
from numpy.typing import NDArray

ORDER = 5
NUM_BYTES = 256
# Before a text's first byte stand ORDER - 1 of these; the texts contain none.
START = 0

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def ngram_codes(texts: list[bytes], order: int) -> Ints:
    """All n-grams of `order` bytes, one ending at each byte of each text, as integers base 256 (first byte highest)."""
    codes = []
    for text in texts:
        data = np.frombuffer(bytes([START]) * (ORDER - 1) + text, dtype=np.uint8).astype(np.int64)
        code = np.zeros(len(text), dtype=np.int64)
        for back in range(order - 1, -1, -1):
            code = code * NUM_BYTES + data[ORDER - 1 - back : len(data) - back]
        codes.append(code)
    return np.concatenate(codes)


class KneserNeyLevel:
    """The counts of one order: `ngrams` sorted codes with `counts`, their discounts, and totals per context."""

    def __init__(self, ngrams: Ints, counts: Ints) -> None:
        self.ngrams, self.counts = ngrams, counts.astype(np.float64)
        n1, n2, n3, n4 = (max(int((counts == times).sum()), 1) for times in (1, 2, 3, 4))
        rate = n1 / (n1 + 2 * n2)
        # Small texts can make an estimate negative or larger than the count it is taken from.
        estimates = (1 - 2 * rate * n2 / n1, 2 - 3 * rate * n3 / n2, 3 - 4 * rate * n4 / n3)
        limits = (1.0, 2.0, 3.0)
        one, two, three = (min(max(e, 0.0), limit) for e, limit in zip(estimates, limits, strict=True))
        self.discounts = np.select([counts == 1, counts == 2], [one, two], default=three)
        self.contexts, first = np.unique(ngrams // NUM_BYTES, return_index=True)
        self.totals = np.add.reduceat(self.counts, first)
        self.backoff = np.add.reduceat(self.discounts, first) / self.totals

    def probability(self, codes: Ints, lower: Floats) -> Floats:
        """P(last byte | bytes before) for each code, given the next lower order's probabilities `lower`."""
        context = codes // NUM_BYTES
        place = np.searchsorted(self.contexts, context).clip(max=len(self.contexts) - 1)
        known = self.contexts[place] == context
        gram = np.searchsorted(self.ngrams, codes).clip(max=len(self.ngrams) - 1)
        seen = self.ngrams[gram] == codes
        kept = np.where(seen, self.counts[gram] - self.discounts[gram], 0.0)
        return np.where(known, kept / self.totals[place] + self.backoff[place] * lower, lower)


class KneserNey:
    """A byte-level ORDER-gram model of `texts`."""

    def __init__(self, texts: list[bytes]) -> None:
        ngrams, counts = np.unique(ngram_codes(texts, ORDER), return_counts=True)
        levels = [KneserNeyLevel(ngrams, counts)]
        for order in range(ORDER - 1, 0, -1):
            # A lower order counts in how many contexts an n-gram was seen, not how often.
            ngrams, counts = np.unique(ngrams % NUM_BYTES**order, return_counts=True)
            levels.append(KneserNeyLevel(ngrams, counts))
        self.levels = levels[::-1]

    def probability(self, codes: Ints) -> Floats:
        """P(last byte | ORDER - 1 bytes before) for ORDER-gram codes as `ngram_codes` makes them."""
        result = np.full(codes.shape, 1.0 / NUM_BYTES)
        for order, level in enumerate(self.levels, start=1):
            result = level.probability(codes % NUM_BYTES**order, result)
        return result

    def bits_per_byte(self, texts: list[bytes]) -> float:
        """Mean of -log2 P over all bytes of `texts`, each text from its start."""
        return float(-np.log2(self.probability(ngram_codes(texts, ORDER))).mean())


def xz_bits_per_byte(train: list[bytes], held_out: list[bytes]) -> tuple[float, float]:
    """(held-out text alone, what it adds to the training text before it) under `xz -9e`, in bits a held-out byte."""

    def size(data: bytes) -> int:
        return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))

    before, after = b"".join(train), b"".join(held_out)
    return 8 * size(after) / len(after), 8 * (size(before + after) - size(before)) / len(after)
