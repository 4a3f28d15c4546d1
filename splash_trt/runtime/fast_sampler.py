"""Samples steps whose rows are all greedy or sampled by temperature alone: the same tokens as sampler.py's, in a few
kernels.

W wanted rows, V ids of this rank. The host never waits, and what runs depends on shapes only, so a graph can hold it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from splash_plugins.shard_sample import reference
from splash_trt.runtime.peers import Peers


class ShardSample(Protocol):
    """The functions of plugins/shard_sample/{reference,kernel}.py."""

    def best_of_shard(
        self,
        logits: Tensor,
        temperature: Tensor,
        seed: Tensor,
        position: Tensor,
        first_id: int,
        score: Tensor,
        id: Tensor,
    ) -> None: ...

    def best_of_shards(self, found: Tensor, tokens: Tensor) -> None: ...


class FastSampler:
    """One rank's part: ids first_id … first_id + V - 1 of vocab_size."""

    def __init__(self, peers: Peers, first_id: int, vocab_size: int, plugin: ShardSample = reference) -> None:
        """plugin: a GPU wants shard_sample's kernel, which needs Triton."""
        assert 0 <= first_id <= vocab_size
        self._peers = peers
        self._first_id = first_id
        self._vocab_size = vocab_size
        self._plugin = plugin

    def __call__(self, logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
        """[W] int64: the same on every rank, as Sampler chooses for rows without filters, penalties or targets.

        logits [W, V] (V differs by rank and may be 0), temperature [W] float64 (0: greedy), seed [W] int64, position
        [W] int64: the position that the token will take.
        """
        # A score and the 64 bits of an id beside it: one message, which nobody has to pack.
        found = torch.empty(len(logits), 2, dtype=torch.float64, device=logits.device)
        # An empty shard stands as one impossible id past the vocabulary, which loses every tie.
        first_id = self._first_id if logits.shape[1] else self._vocab_size
        score, ids = found[:, 0], found.view(torch.int64)[:, 1]
        self._plugin.best_of_shard(logits, temperature, seed, position, first_id, score, ids)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        self._plugin.best_of_shards(self._peers.gather_small(found), tokens)
        return tokens
