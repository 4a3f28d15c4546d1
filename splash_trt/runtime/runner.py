"""One rank's execution of a plan, from ids to sampled ids: the order of a step's parts is this file."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from splash_engines import ops
from splash_engines.lower_torch import TorchEngine
from splash_plugins.cache_append.reference import cache_append
from splash_trt.cache.placement import num_pages
from splash_trt.cache.storage import PageStorage
from splash_trt.config import EngineConfig, Layout
from splash_trt.dist.board import Watch
from splash_trt.dist.collectives import Collectives
from splash_trt.layout.spec import SPECS, Residency, Tokens
from splash_trt.memory.arena import DTYPES, Arena
from splash_trt.memory.map import memory_map
from splash_trt.migration.mover import Mover
from splash_trt.models.config import ModelConfig
from splash_trt.plan import SAMPLE, Plan, RankStatus, StepResult
from splash_trt.request import Grammar
from splash_trt.runtime.absorbed import ABSORBED, AbsorbedAttention
from splash_trt.runtime.controls import Controls
from splash_trt.runtime.expanded import ExpandedAttention
from splash_trt.runtime.grammar import compiler_of
from splash_trt.runtime.inputs import InputBuilder, StepInputs
from splash_trt.runtime.penalties import Share
from splash_trt.runtime.rounds import index_tensor
from splash_trt.runtime.sampler import RowParams, Sampler
from splash_trt.runtime.tables import SlotTables
from splash_trt.weights.shards import heads_of
from splash_trt.weights.source import WeightSource
from splash_trt.weights.spec import partition
from splash_trt.weights.store import WeightStore


class Runner:
    """Holds a rank's arena, weights, cache pages and tables; `run` is called with every plan, on every rank."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        collectives: Collectives,
        watch: Watch,
        source: WeightSource,
        tokenizer: Path | None = None,
    ) -> None:
        """tokenizer: a folder with tokenizer.json, which requests with a grammar need."""
        rank, dtype = collectives.rank, DTYPES[config.dtype]
        max_context = config.context_of(model.max_positions)
        self._model = model
        self._comm = collectives
        self._watch = watch
        self._arena = Arena(memory_map(model, config, rank))
        self.weights = WeightStore(self._arena, model, rank, collectives.size, config.dtype)
        self.weights.load_own(source)
        if SPECS[config.layout].residency is Residency.FULL:
            self.weights.load_others(source)
        self.storage = PageStorage(self._arena, model, config.page_tokens, dtype)
        self.engines = {
            layout: TorchEngine(model, spec, self.weights, collectives, config.simulate_routing)
            for layout, spec in SPECS.items()
        }
        self._tables = SlotTables(rank, config.max_running, num_pages(max_context, config.page_tokens))
        self._inputs = InputBuilder(config, rank, self._tables)
        self._absorbed = AbsorbedAttention(
            collectives=collectives,
            heads=heads_of(model, collectives.size),
            latent=model.kv_lora_rank,
            scale=model.softmax_scale,
        )
        buffer, workspace = self._arena.context_workspace(model, config.context_block, dtype)
        self._expanded = ExpandedAttention(model, collectives, buffer, workspace)
        self._frequencies = ops.rope_frequencies(model.rope, model.qk_rope_head_dim)
        self._mover = Mover(self.storage, self.weights, collectives)
        self._ended = time.monotonic()
        first, end = partition(model.vocab_size, collectives.size)[rank]
        self._sampler = Sampler(collectives, first, model.vocab_size)
        self._compiler = compiler_of(tokenizer, model.vocab_size, model.eos_token_ids)
        share = Share(first, end - first)
        self._controls = Controls(share, config.max_running, model.eos_token_ids, self._compiler)

    def check_grammar(self, grammar: Grammar) -> None:
        """ValueError if it does not compile, or this deployment can follow none."""
        if isinstance(self._compiler, str):
            raise ValueError(self._compiler)
        self._compiler.check(grammar)

    def launch(self, plan: Plan) -> Callable[[], StepResult]:
        """`run`, as a rank whose device works on its own has it: what it returns gives the result."""
        result = self.run(plan)
        return lambda: result

    def close(self) -> None:
        """Nothing outlives a step here."""

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepResult:
        """One step. What a switch moves travels before and after the model."""
        begin = time.monotonic()
        gap = begin - self._ended
        new_epoch = self._tables.apply(plan)
        self._controls.apply(plan)
        if new_epoch:
            self.weights.residency = SPECS[plan.layout].residency
        errors = [self._mover.before(plan)]
        result = self._compute(plan) if plan.num_tokens else StepResult.empty(plan.step)
        errors.append(self._mover.after(plan))
        statuses: tuple[RankStatus, ...] = ()
        if plan.attempt or new_epoch:
            statuses = self._mover.statuses(RankStatus("; ".join(filter(None, errors)), gap))
        self._ended = time.monotonic()
        return dataclasses.replace(result, seconds=self._ended - begin, statuses=statuses)

    def _compute(self, plan: Plan) -> StepResult:
        step = self._inputs.build(plan)
        engine = self.engines[plan.layout]
        self._check_residency(plan.layout)
        token = step.token.clone()
        token[step.sampled_at] = self._tables.last_sampled[step.sampled_slot]
        hidden = engine.embed(token, step.counts, index_tensor(plan.position)[step.order])
        cos, sin = self._rope(step, hidden.dtype)
        for layer in range(self._model.num_layers):
            self._watch.layer(layer)
            hidden = hidden + self._attention(layer, engine, hidden, cos, sin, step)
            hidden = hidden + engine.mlp(layer, hidden, step.counts)
        return self._sample(engine, hidden, step)

    def _rope(self, step: StepInputs, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        yarn = self._model.rope.yarn
        factor = yarn.attention_factor if yarn else 1.0
        table = torch.promote_types(dtype, torch.float32)
        return ops.rope_tables(step.position, self._frequencies, factor, table)

    def _check_residency(self, layout: Layout) -> None:
        if SPECS[layout].residency is Residency.FULL:
            assert self.weights.residency is Residency.FULL or self._comm.size == 1, f"{layout.name} without weights"

    def _attention(
        self,
        layer: int,
        engine: TorchEngine,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: StepInputs,
    ) -> torch.Tensor:
        """hidden [T_r, D] through attention; returns what is added to the residual, [T_r, D]."""
        x = engine.attention_norm(layer, hidden)
        q_nope, q_rope, rows = engine.attention_in(layer, x, cos, sin)
        pages = self.storage.layer(layer)
        for append in (step.append, step.append_target):
            cache_append(pages, rows[append.source], append.page, append.offset)
        values = q_nope.new_empty((*q_nope.shape[:2], self._model.v_head_dim))
        if step.absorbed is not None:
            here = step.absorbed.here
            q = engine.absorb(layer, q_nope[here], q_rope[here])
            latents = ABSORBED[step.plan.layout](self._absorbed, q, rows[here], pages, step.absorbed)
            values[here] = engine.v_up(layer, latents)
        if step.rounds:
            here = step.expanded
            values[here] = self._expanded(
                layer, engine, q_nope[here], q_rope[here], step.position[here], rows, pages, step.rounds
            )
        return engine.attention_out(layer, values)

    def _sample(self, engine: TorchEngine, hidden: torch.Tensor, step: StepInputs) -> StepResult:
        plan = step.plan
        wanted = hidden[step.want_here]
        if SPECS[plan.layout].tokens is Tokens.SPREAD:
            wanted = self._comm.all_gather(wanted, step.want_counts)[step.want_order]
        row = plan.want_row
        slot = plan.slot[row]
        position = plan.position[plan.want_index] + 1
        params = RowParams.build(self._tables.sampling[slot], position, plan.want_target, hidden.device)
        adjustment = self._controls.adjustment(slot, position, plan.want_target)
        found = self._sampler(engine.head(wanted), params, adjustment)
        chosen = np.flatnonzero(plan.want_target == SAMPLE)
        self._tables.remember(torch.from_numpy(slot[chosen].astype(np.int64)), found.tokens[chosen])
        self._controls.remember(slot[chosen], found.tokens[chosen])
        return StepResult(
            step=plan.step,
            token=found.tokens.numpy(),
            logprob=found.logprob.numpy(),
            top_token=found.top_token.numpy(),
            top_logprob=found.top_logprob.numpy(),
            errors=adjustment.errors if adjustment is not None else {},
        )

