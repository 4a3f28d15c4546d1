"""Offline generation: `LLM(checkpoint, ranks=4, layout="dop").generate(prompts, sampling)`.

Without mpirun the ranks are threads of this process. Under mpirun the script runs on every rank, makes the same calls
on each, and every rank gets the same outputs.
"""

from __future__ import annotations

import operator
import reprlib
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch

from splash_trt import environment
from splash_trt.config import DEFAULTS, MOST_MEMORY_BYTES, EngineConfig, Layout
from splash_trt.dist.collectives import RankFailure
from splash_trt.dist.control import Kind
from splash_trt.dist.place import choose, default_arena_bytes, gpu_name, run_on_of
from splash_trt.dist.world import CPU, ThreadWorld, World
from splash_trt.memory.map import capacity, model_sizes
from splash_trt.models.config import ModelConfig
from splash_trt.models.families import load_config
from splash_trt.models.runnable import refuse_unrunnable
from splash_trt.orchestrator import Orchestrator, cost_policy
from splash_trt.request import Completion, Request, SamplingParams, TokenDelta
from splash_trt.scheduler.compare import Objective
from splash_trt.scheduler.devices import device_for, load_device
from splash_trt.weights.checkpoint import Checkpoint
from splash_trt.weights.dummy import DummyWeights
from splash_trt.weights.source import WeightSource
from splash_trt.worker import start_worker

STARTUP_DEADLINE_S = 600.0


class LLM:
    """A model on N ranks. Close it, or use it as a context manager.

    checkpoint: a Hugging Face folder.
    dummy_weights: a seed; weights are random, and only config.json is read.
    layout: "tp", "dp", "cp", "dop", or "auto", which follows the load.
    device, objective: for "auto": a description of the device (a built-in one or a file), which says how long steps
        take, and the goal: throughput, latency or bounded:MS.
    run_on: "cpu"; "gpu", one for each rank (several ranks then need mpirun); "shared-gpu", GPUs that ranks may share
        (likewise); or "auto": GPUs if there is one for every rank.
    config: the remaining fields of EngineConfig. On GPUs, dtype is bfloat16 by default, and memory_bytes 85 % of the
        smallest GPU's memory, or a rank's part of that if ranks share it.

    Raises ValueError for a wrong configuration or checkpoint, before any rank starts.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        ranks: int = 1,
        run_on: str = "auto",
        layout: str = "tp",
        dummy_weights: int | None = None,
        device: str | Path | None = None,
        objective: str = "throughput",
        **config: Any,
    ) -> None:
        if not isinstance(ranks, int) or ranks < 1:
            raise ValueError(f"ranks: {ranks!r} is not a whole number from 1")
        folder = Path(checkpoint)
        goal = Objective.parse(objective)
        known = None if device is None else load_device(device)
        self.model: ModelConfig = load_config(folder)
        names = ("auto", *(each.name.lower() for each in Layout))
        if not isinstance(layout, str) or layout.lower() not in names:
            raise ValueError(f"layout: {layout!r} is not one of {', '.join(names)}")
        auto = layout.lower() == "auto"
        if auto:
            config.setdefault("layouts", tuple(Layout))
        self._fields = dict(config, num_ranks=ranks, layout=Layout.TP if auto else Layout.parse(layout))
        if config.get("dtype") is None:
            self._fields.pop("dtype", None)
        # Refuses a wrong configuration before any rank runs. How much memory GPUs have is known only on ranks, below.
        self.config = self._configured(_run_on(run_on, ranks), MOST_MEMORY_BYTES)
        self._source: WeightSource = (
            Checkpoint(folder, self.model) if dummy_weights is None else DummyWeights(self.model, dummy_weights)
        )
        self._tokenizer = folder if (folder / "tokenizer.json").exists() else None
        self._count = 0
        self._turn = threading.Lock()  # held by the thread that is in generate()
        self._broken = False
        self._closed = False
        self._close: Callable[[], None] = lambda: None
        world = self._start(run_on)
        place = run_on_of(world)
        if "gpu" in (place, self.config.run_on):
            self.config = self._configured(place, default_arena_bytes(world) if place == "gpu" else 0)
        self.capacity = capacity(self.model, self.config, self.config.layout)
        self._worker = start_worker(world, self.model, self.config, self._source, self._tokenizer)
        rank = self._worker.world.rank
        self.orchestrator: Orchestrator | None = None
        if rank == 0:
            policy = None
            if auto:
                known = known or device_for(folder, ranks, gpu_name(world))
                policy = cost_policy(self.model, self.config, known, goal)
            self.orchestrator = Orchestrator.of(self.model, self.config, self._worker, policy)

    def _configured(self, run_on: str, gpu_bytes: int) -> EngineConfig:
        """The configuration for ranks on `run_on`. gpu_bytes: the arena's size on a GPU if memory_bytes is not given.
        Raises ValueError as __init__ does."""
        fields = {"dtype": self.model.dtype, **DEFAULTS[run_on], **self._fields, "run_on": run_on}
        if run_on == "gpu":
            fields.setdefault("memory_bytes", gpu_bytes)
        config = EngineConfig(**fields)
        refuse_unrunnable(self.model, config)
        model_sizes(self.model, config)
        return config

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Continue every prompt (token ids); returns outputs in the prompts' order.

        sampling: one for all prompts, or one for each. ValueError says what is wrong with a prompt, before any is run.
        """
        if not self._turn.acquire(blocking=False):
            raise RuntimeError("another thread is in generate() of this LLM, which takes one call at a time")
        try:
            return self._generate(prompts, sampling)
        finally:
            self._turn.release()

    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Completion]:
        if self._closed:
            raise RuntimeError("this LLM is closed; make a new one")
        if self._broken:
            raise RuntimeError("an earlier generate() was interrupted; make a new LLM")
        if not isinstance(prompts, Collection):
            raise ValueError(f"prompts: {prompts!r} is not a list; give a list of prompts, each a list of token ids")
        requests = self._requests(prompts, sampling)
        self._count += len(requests)
        if self.orchestrator is None:
            answer = self._worker.follow()
            if answer is None:
                raise RuntimeError("rank 0 has closed this LLM; every rank has to make the same calls of generate()")
            if isinstance(answer, str):
                raise ValueError(answer)
            return msgspec.convert(answer, list[Completion])
        control = self._worker.world.control
        try:
            self._add(requests, self.orchestrator)
        except ValueError as error:
            control.send_object(str(error))  # every rank raises the same error
            raise
        self._broken = True  # until all requests have ended
        outputs = self._run(requests, self.orchestrator)
        self._broken = False
        control.send_object(msgspec.to_builtins(outputs))
        return outputs

    def _requests(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        text = next((prompt for prompt in (prompts, *prompts) if isinstance(prompt, str)), None)
        if text is not None:
            raise ValueError(
                f"prompts: {reprlib.repr(text)} is a text; give a list of token ids for each prompt, such as "
                "tokenizers.Tokenizer.from_file(FOLDER + '/tokenizer.json').encode(TEXT).ids"
            )
        wrong = next((prompt for prompt in prompts if not isinstance(prompt, Iterable)), None)
        if wrong is not None:
            raise ValueError(f"prompts: {wrong!r} is not a list of token ids; give one such list for each prompt")
        params = sampling if isinstance(sampling, Sequence) else [sampling or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"sampling: {len(params)} for {len(prompts)} prompts; give one, or one for each")
        for p in params:
            if not isinstance(p, SamplingParams):
                raise ValueError(f"sampling: {p!r} is not a SamplingParams")
        return [
            Request(id=f"{self._count + i:08d}", prompt=_token_ids(prompt), sampling=p)
            for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
        ]

    def _add(self, requests: Sequence[Request], orchestrator: Orchestrator) -> None:
        """Adds all requests or, if one is wrong, none, and raises ValueError."""
        added = []
        try:
            for request in requests:
                grammar = request.sampling.grammar
                if grammar is not None:
                    self._worker.runner.check_grammar(grammar)
                orchestrator.add(request)
                added.append(request.id)
        except ValueError:
            for request_id in added:
                orchestrator.cancel(request_id)
            raise

    @staticmethod
    def _run(requests: Sequence[Request], orchestrator: Orchestrator) -> list[Completion]:
        deltas: dict[str, list[TokenDelta]] = {request.id: [] for request in requests}
        while not orchestrator.idle:
            for delta in orchestrator.step():
                deltas[delta.request_id].append(delta)
        return [_completion(request, deltas[request.id]) for request in requests]

    def close(self) -> None:
        """End the ranks. Under mpirun MPI ends too. A second call does nothing."""
        close, self._close = self._close, lambda: None
        self._closed = True
        close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not environment.under_mpirun():  # there an error that nobody catches ends all ranks
            with suppress(RankFailure):  # which is the error itself, or a consequence of it
                self.close()

    def _start(self, run_on: str) -> World:
        """This process's rank. Without mpirun, starts the other ranks as threads."""
        deadline_s = self.config.step_deadline_s
        if not environment.under_mpirun():
            device = torch.device("cuda", 0) if self.config.run_on == "gpu" else CPU
            threads = ThreadWorld(self.config.num_ranks, deadline_s, device)
            self._close = lambda: self._end(threads.join)
            return threads.start(self._follow)
        from splash_trt.dist.world_mpi import MpiWorld  # makes this process a rank

        mpi = MpiWorld(deadline_s, STARTUP_DEADLINE_S, run_on)
        if mpi.world.size != self.config.num_ranks:
            raise ValueError(f"ranks: {self.config.num_ranks} asked for, but mpirun started {mpi.world.size}")
        self._close = lambda: self._end(mpi.close)
        return mpi.world

    def _follow(self, world: World) -> None:
        """The program of a rank that is a thread: executes plans, and ignores the outputs of generate()."""
        worker = start_worker(world, self.model, self.config, self._source, self._tokenizer)
        while worker.follow() is not None:
            pass
        worker.runner.close()

    def _end(self, leave: Callable[[], object]) -> None:
        """Ends the run: rank 0 tells the others; under mpirun, the others wait for that here."""
        if self.orchestrator is not None:
            self._worker.world.control.send(Kind.STOP)
        else:
            self._worker.follow()
        self._worker.runner.close()
        leave()


def _run_on(wish: str, ranks: int) -> str:
    """EngineConfig.run_on for a wish, as far as this process can tell. Raises ValueError if that is impossible."""
    if environment.under_mpirun():
        return choose(wish, environment.ranks_here())
    if ranks > 1 and wish in ("gpu", "shared-gpu"):
        raise ValueError(f"run_on: on GPUs {ranks} ranks are processes: start the script with mpirun -n {ranks}")
    return choose("cpu" if ranks > 1 and wish == "auto" else wish, ranks)


def _token_ids(prompt: Iterable[int]) -> tuple[int, ...]:
    """Whole numbers of whatever type, numpy's say, as ints. What is none stays, for Request.check to refuse."""
    ids = tuple(prompt)
    return ids if set(map(type, ids)) <= {int} else tuple(map(_as_int, ids))


def _as_int(token: int) -> int:
    try:
        return token if isinstance(token, bool) else operator.index(token)
    except TypeError:
        return token


def _completion(request: Request, deltas: Sequence[TokenDelta]) -> Completion:
    """Joins a request's deltas into one value; the last says how the request finished."""
    last = deltas[-1]
    assert last.finish is not None, request.id
    return Completion(
        request_id=request.id,
        prompt=request.prompt,
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        finish=last.finish,
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        prompt_logprobs=tuple(entry for delta in deltas for entry in delta.prompt_logprobs),
        error=last.error,
    )
