"""One rank's execution of plans on its device: a plan is launched, and its result is fetched later.

In between the host goes on: it prepares the next plan while this one runs. The token ids that a step samples are input
of the next step, so they stay on the device. All work is enqueued on one stream, in the order of the plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from splash_engines.kernels import Kernels
from splash_plugins.mla_attention.cut import num_sms_of
from splash_trt.cache.placement import num_pages
from splash_trt.cache.storage import PageStorage
from splash_trt.config import EngineConfig
from splash_trt.dist.world import World
from splash_trt.layout.spec import SPECS, Residency
from splash_trt.memory.arena import DTYPES, Arena
from splash_trt.migration.mover import Mover
from splash_trt.migration.peer_mover import PeerMover
from splash_trt.models.config import ModelConfig
from splash_trt.plan import SAMPLE, Plan, RankStatus, StepResult
from splash_trt.request import Grammar
from splash_trt.runtime.block_tables import BlockTables
from splash_trt.runtime.controls import Adjustment, Controls
from splash_trt.runtime.device_clock import Clock
from splash_trt.runtime.device_step import RankState
from splash_trt.runtime.fast_sampler import FastSampler, ShardSample
from splash_trt.runtime.grammar import compiler_of
from splash_trt.runtime.graphs import Forward, Forwarded, is_plain
from splash_trt.runtime.peers import Peers
from splash_trt.runtime.penalties import Share
from splash_trt.runtime.program import Program
from splash_trt.runtime.sampler import RowParams, Sampled, Sampler
from splash_trt.runtime.shapes import Shapes
from splash_trt.runtime.step_arrays import ArrayBuilder
from splash_trt.runtime.upload import Uploader
from splash_trt.weights.shards import heads_of
from splash_trt.weights.source import WeightSource
from splash_trt.weights.spec import partition
from splash_trt.weights.store import WeightStore


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a runner is made of besides the model: CPUs and GPUs have their own of each."""

    arena: Arena
    kernels: Kernels
    sample: ShardSample
    peers: Peers
    clock: Clock
    decode_sizes: Sequence[int]
    """The sizes that steps which only decode are padded to (shapes.py); empty: no step is padded."""
    capture: bool
    """Whether padded steps are captured as CUDA graphs and replayed (graphs.py)."""
    mover: PeerMover | None = None
    """For ranks that can write into each other's memory; None: rows and weights move by collectives (mover.py)."""
    program: Callable[..., Program] = Program
    """Makes the program of a layout; takes Program's arguments."""


class DeviceRunner:
    """Holds a rank's arena, weights, cache pages and tables; `launch` is called with every plan, on every rank."""

    def __init__(
        self,
        world: World,
        model: ModelConfig,
        config: EngineConfig,
        source: WeightSource,
        tokenizer: Path | None,
        parts: Parts,
    ) -> None:
        rank, size, arena = world.rank, world.size, parts.arena
        self._peers = parts.peers
        self._clock = parts.clock
        self.weights = WeightStore(arena, model, rank, size, config.dtype, config.experts_cut)
        self.weights.load_own(source)
        if SPECS[config.layout].residency is Residency.FULL:
            self.weights.load_others(source)
        self.storage = PageStorage(arena, model, config.page_tokens, DTYPES[config.dtype])
        self._device = self.storage.pages.device
        slots, pages = config.max_running, num_pages(config.context_of(model.max_positions), config.page_tokens)
        self._tables = BlockTables(rank, size, slots, pages)
        self._state = _rank_state(model, config, arena, self.weights, self.storage, slots, pages)
        self._target_tables = torch.zeros_like(self._state.tables)
        first, end = partition(model.vocab_size, size)[rank]
        shapes = Shapes(config, parts.decode_sizes)
        heads, num_sms = heads_of(model, size), num_sms_of(self._device)
        builder = ArrayBuilder(config, rank, self._tables, shapes, heads=heads, num_sms=num_sms)
        self._upload = Uploader(self._device, _fixed_bytes(config, max(parts.decode_sizes, default=0)))
        programs = {
            layout: parts.program(model, config, layout, parts.kernels, parts.peers, self._state, world.watch)
            for layout in config.allowed_layouts
        }
        self._forward = Forward(
            programs,
            builder,
            shapes,
            self._upload,
            FastSampler(parts.peers, first, model.vocab_size, parts.sample),
            self._state.last_sampled,
            self.storage.pages.new_empty(shapes.most_wanted * (end - first)) if parts.capture else None,
        )
        self._mover = parts.mover or Mover(self.storage, self.weights, world.collectives)
        self._status = torch.zeros(1 + _STATUS_BYTES // 8, dtype=torch.float64, device=self._device)
        self._sampler = Sampler(world.collectives, first, model.vocab_size)
        self._compiler = compiler_of(tokenizer, model.vocab_size, model.eos_token_ids)
        self._controls = Controls(Share(first, end - first), slots, model.eos_token_ids, self._compiler, self._device)

    def check_grammar(self, grammar: Grammar) -> None:
        """ValueError if the grammar does not compile, or if this deployment cannot constrain output by grammars."""
        if isinstance(self._compiler, str):
            raise ValueError(self._compiler)
        self._compiler.check(grammar)

    def warm_up(self) -> None:
        """Compiles kernels and captures graphs before requests need them. To be called on all ranks together."""
        with torch.inference_mode():
            self._forward.warm_up()

    def close(self) -> None:
        self._forward.close()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Callable[[], StepResult]:
        """Enqueues one step: the model, and before and after it what a switch copies. Returns a function that waits for
        the device and gives the result."""
        self._clock.begin()
        new_epoch = self._take_over(plan)
        errors = [self._mover.before(plan)]
        found, faults = self._compute(plan) if plan.num_tokens else ({}, {})
        errors.append(self._mover.after(plan))
        if plan.attempt or new_epoch:
            found["statuses"] = self._statuses("; ".join(filter(None, errors)))
        return _Handle(plan, {name: _to_host(x) for name, x in found.items()}, faults, self._clock.end())

    def _take_over(self, plan: Plan) -> bool:
        """Takes over the plan's changes of block tables, controls and the epoch. True: the plan begins a new epoch."""
        new_epoch = self._tables.apply(plan)
        self._controls.apply(plan)
        residency = SPECS[plan.layout].residency
        if new_epoch:
            self.weights.residency = residency
            # Copied, not swapped: captured graphs read the tables at this address.
            self._state.tables.copy_(self._target_tables)
        if plan.num_tokens and residency is Residency.FULL and self._peers.size > 1:
            assert self.weights.residency is Residency.FULL, f"{plan.layout.name} without weights"
        both = (self._state.tables, self._target_tables)
        for tables, (place, page) in zip(both, self._tables.own_changes(plan), strict=True):
            if len(place):
                tables.view(-1).index_copy_(0, *self._upload.plain(place, page))
        return new_epoch

    def _compute(self, plan: Plan) -> tuple[dict[str, torch.Tensor], dict[int, str]]:
        """Runs the model and samples. Returns StepResult's fields of the wanted rows, on the device, and its errors."""
        row = plan.want_row
        slot = plan.slot[row]
        position = plan.position[plan.want_index] + 1
        adjustment = self._controls.adjustment(slot, position, plan.want_target)
        plain = adjustment is None and is_plain(self._tables.sampling[slot], plan.want_target)
        forwarded = self._forward(plan, plain)
        count = len(plan.want_index)
        if forwarded.tokens is not None:
            return {"token": forwarded.tokens[:count]}, {}
        found = self._sample(plan, forwarded, slot, position, adjustment)
        out = {
            "token": found.tokens,
            "logprob": found.logprob,
            "top_token": found.top_token,
            "top_logprob": found.top_logprob,
        }
        return out, {} if adjustment is None else adjustment.errors

    def _sample(
        self, plan: Plan, forwarded: Forwarded, slot: np.ndarray, position: np.ndarray, adjustment: Adjustment | None
    ) -> Sampled:
        params = RowParams.build(self._tables.sampling[slot], position, plan.want_target, self._device)
        logits = forwarded.logits[: len(slot)]
        found = self._sampler(logits.to(torch.promote_types(logits.dtype, torch.float32)), params, adjustment)
        chosen = np.flatnonzero(plan.want_target == SAMPLE)
        slots, index = self._upload.plain(slot[chosen].astype(np.int64), chosen.astype(np.int64))
        self._state.last_sampled.index_copy_(0, slots, found.tokens[index])
        if adjustment is not None:
            self._controls.remember(slot[chosen], found.tokens[index])
        return found

    def _statuses(self, error: str) -> torch.Tensor:
        """[N, 1, numbers] float64: every rank's gap before this step in ns, then its error's text as bytes.

        Nothing is uploaded where there is no error, so that statuses lengthen a switch's steps as little as possible.
        """
        status = self._status
        if error:
            text = error.encode()[:_STATUS_BYTES].ljust(_STATUS_BYTES, b"\0")
            status = torch.cat([status[:1], *self._upload.plain(np.frombuffer(text, np.float64))])
        status[:1].copy_(self._clock.gap())
        # The step may have been a replayed graph, whose use of the peers' buffers is not known on the host.
        self._peers.begin()
        return self._peers.gather_small(status[None])


_STATUS_BYTES = 256


class _Handle:
    """A launched step; calling it waits for the step and gives its result."""

    def __init__(
        self, plan: Plan, found: dict[str, torch.Tensor], errors: dict[int, str], seconds: Callable[[], float]
    ) -> None:
        self._plan = plan
        self._found = found
        self._errors = errors
        self._seconds = seconds

    def __call__(self) -> StepResult:
        seconds = self._seconds()  # waits
        found = {name: x.numpy() for name, x in self._found.items()}
        count = len(self._plan.want_index) if self._plan.num_tokens else 0
        none = np.zeros((count, 0))
        return StepResult(
            step=self._plan.step,
            token=found.get("token", np.zeros(0, np.int64)),
            logprob=found.get("logprob", np.full(count, np.nan)),
            top_token=found.get("top_token", none.astype(np.int64)),
            top_logprob=found.get("top_logprob", none),
            errors=self._errors,
            seconds=seconds,
            statuses=tuple(
                RankStatus(row[0, 1:].tobytes().rstrip(b"\0").decode(errors="replace"), float(row[0, 0]) * 1e-9)
                for row in found.get("statuses", ())
            ),
        )


def _to_host(x: torch.Tensor) -> torch.Tensor:
    """A copy in host memory that is complete when the step has ended."""
    if x.device.type == "cpu":
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


def _rank_state(
    model: ModelConfig,
    config: EngineConfig,
    arena: Arena,
    weights: WeightStore,
    storage: PageStorage,
    slots: int,
    pages: int,
) -> RankState:
    context, expanded = arena.context_workspace(model, config.context_block, storage.pages.dtype)
    return RankState(
        weights=weights,
        storage=storage,
        tables=torch.zeros((slots, pages), dtype=torch.int32, device=context.device),
        last_sampled=torch.zeros(slots + 1, dtype=torch.int64, device=context.device),
        context=context,
        expanded=expanded,
    )


def _fixed_bytes(config: EngineConfig, largest: int) -> int:
    """An upper bound on the bytes of the largest padded step's arrays: some 30 numbers for each row, and where each
    context row lies."""
    rows = config.num_ranks * max(largest, config.max_batch_tokens)
    return 256 * rows + 16 * config.context_block + (1 << 16)
