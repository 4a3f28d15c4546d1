"""One rank of a serving run: opens the model, joins the others, and on rank 0 drives them for the frontends.

    mpirun -n 4 splash-trt serve …        rank 0 starts the frontends before MPI, and ends with them
    splash-trt serve --ranks 4 …          a supervisor (supervise.py) starts them and mpirun

Under mpirun the exit code is mpirun's: 0 after a SIGTERM to the frontend; 2 for what a user got wrong; 1 after Ctrl-C
or SIGTERM to mpirun, which leaves ranks no time to finish streams (their clients are told); otherwise that of the rank
that ended first: 137 if it was killed, 70 if it made no progress for too long, 72 if a frontend died, 1 for an error.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from splash_engines.open import open_engine
from splash_trt import environment, lifeline
from splash_trt.config import DEFAULTS, MOST_MEMORY_BYTES, EngineConfig, Layout
from splash_trt.dist.control import Kind
from splash_trt.dist.place import choose, default_arena_bytes, gpu_name, refuse_too_much, run_on_of
from splash_trt.dist.watchdog import last_words
from splash_trt.dist.world import World
from splash_trt.engine_server import EngineServer, new_incarnation, ready_message
from splash_trt.frontend.client_socket import check_endpoint, check_free
from splash_trt.frontend.connection import check_port
from splash_trt.frontend.main import load_defaults
from splash_trt.frontend.options import HttpSettings
from splash_trt.frontend.options import Options as FrontendOptions
from splash_trt.frontend.tokenizer import Tokenizer
from splash_trt.frontends import Frontends
from splash_trt.launch import run_under_mpi
from splash_trt.link import Ready
from splash_trt.link_server import LinkServer
from splash_trt.memory.map import default_memory_bytes, model_sizes
from splash_trt.models.config import ModelConfig
from splash_trt.models.families import load_config
from splash_trt.models.runnable import refuse_unrunnable
from splash_trt.observe import log as logs
from splash_trt.observe.options import check_trace
from splash_trt.observe.spans import check_endpoint as check_collector
from splash_trt.observe.trace import StepTracer
from splash_trt.orchestrator import Orchestrator, cost_policy
from splash_trt.scheduler.compare import Objective
from splash_trt.scheduler.devices import device_for, load_device, refuse_undescribed
from splash_trt.weights.dummy import DummyWeights
from splash_trt.weights.source import WeightSource
from splash_trt.worker import start_worker

log = logging.getLogger(__name__)

STARTUP_DEADLINE_S = 1800.0
FOLDER_PREFIX = "splash-trt-"

log = logging.getLogger(__name__)


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line; the same on every rank."""

    engine: str | None = None
    model: str | None = None
    """A folder with a config.json, for dummy weights."""
    dummy_weights: int | None = None
    ranks: int = 1
    run_on: str = "auto"
    layout: str = "auto"
    dtype: str | None = None
    memory_bytes: int | None = None
    page_tokens: int = 64
    max_batch_tokens: int | None = None
    max_running: int | None = None
    max_context: int | None = None
    step_deadline_s: float = 60.0
    simulate_routing: str | None = None
    experts_cut: str = "whole"
    operators: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    device: str | None = None
    """The description of the ranks' devices for the cost model: a built-in one or a file; None: see device_for."""
    objective: str = "throughput"
    name: str | None = None
    """The model's name in /v1/models; None: the folder's name."""
    otlp_endpoint: str | None = None
    trace: str | None = None
    """A file for rank 0 to write a trace to."""
    log_format: str = "text"
    log_level: str = "info"
    client_endpoint: str | None = None
    """Where local clients are served, such as Triton's model."""
    http: HttpSettings = HttpSettings()
    """The frontend's other options."""

    @property
    def folder(self) -> Path:
        folder = self.engine or self.model
        assert folder is not None
        return Path(folder)

    @property
    def model_name(self) -> str:
        return self.name or self.folder.resolve().name

    def check(self) -> None:
        """Raises ValueError for options that are wrong or do not go together."""
        for field in ("engine", "model", "name", "trace"):
            value = getattr(self, field)
            if value is not None and not _is_text(value):
                raise ValueError(f"--{field}: {value!r} is not allowed; it must be text in UTF-8, and not empty")
        if (self.engine is None) == (self.model is None):
            raise ValueError("--engine: give either --engine ENGINE or --model DIR with --dummy-weights SEED")
        if (self.model is None) != (self.dummy_weights is None):
            raise ValueError("--dummy-weights: goes with --model DIR and the reverse; for real weights build an engine")
        started = environment.mpi_size()
        if environment.under_mpirun() and self.ranks != started:
            raise ValueError(f"--ranks: {self.ranks} asked for, but mpirun starts {started}; leave it out")
        if self.client_endpoint is not None:
            check_endpoint(self.client_endpoint)
        if self.otlp_endpoint is not None:
            check_collector(self.otlp_endpoint)
        if self.trace is not None:
            check_trace(self.trace)
        Objective.parse(self.objective)
        if self.device is not None:
            load_device(self.device)


def _is_text(value: str) -> bool:
    """Whether a value is not empty and can be passed on in UTF-8; a shell may give any bytes."""
    try:
        return bool(value.encode())
    except UnicodeEncodeError:
        return False


def open_model(options: ServeOptions) -> tuple[ModelConfig, WeightSource]:
    """The model and the source of its weights. Raises ValueError or OSError for what is wrong with the folder."""
    if options.engine is not None:
        engine = open_engine(options.folder)
        return engine.model, engine.source
    assert options.dummy_weights is not None
    model = load_config(options.folder)
    return model, DummyWeights(model, options.dummy_weights)


def engine_config(options: ServeOptions, model: ModelConfig, run_on: str, memory_bytes: int | None) -> EngineConfig:
    """The deployment's configuration. It allows every layout, so that an operator can switch. Raises ValueError.

    run_on: as in EngineConfig. memory_bytes: the arena's size if no option gives it; None: what ranks on CPUs get.
    """
    auto = options.layout.lower() == "auto"
    fields: dict[str, Any] = {"dtype": model.dtype, **DEFAULTS[run_on]}
    for name in ("dtype", "max_batch_tokens", "max_running"):
        if getattr(options, name) is not None:
            fields[name] = getattr(options, name)
    fields |= dict(
        num_ranks=options.ranks,
        run_on=run_on,
        layout=Layout.TP if auto else Layout.parse(options.layout),
        layouts=tuple(Layout),
        simulate_routing=options.simulate_routing or "",
        experts_cut=options.experts_cut,
        operators=options.operators,
        page_tokens=options.page_tokens,
        max_context=options.max_context,
        step_deadline_s=options.step_deadline_s,
    )
    refuse_unrunnable(model, EngineConfig(**fields))
    memory = memory_bytes if options.memory_bytes is None else options.memory_bytes
    if memory is None:
        memory = default_memory_bytes(model, EngineConfig(**fields))
    config = EngineConfig(memory_bytes=memory, **fields)
    model_sizes(model, config)  # says which rank lacks how much, if one does
    return config


def warn_of_context(model: ModelConfig, config: EngineConfig, max_context: int) -> None:
    """A line on the log if requests may not be as long as was asked for. max_context: how long they may be."""
    asked = config.max_context
    if asked is not None and asked > max_context:
        limit = "the model was made for" if max_context == model.max_positions else "some layout's cache holds"
        log.warning("--max-context: %d is more than %s, so it is %d", asked, limit, max_context)


class OwnFrontends:
    """The frontends as children of rank 0, each connected to it by two descriptors only (see frontends.py).

    They are started before MPI is, since a process that has become a rank can start no other. So if one ends otherwise
    than in order before `close`, it cannot be replaced, and this process ends too, whatever it is doing.
    """

    def __init__(self, options: ServeOptions) -> None:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self._folder = folder
        self.link_address = f"ipc://{folder}/link"

        def failed(code: int, why: str) -> None:
            last_words(f"rank 0: {why}")
            lifeline.remove_sockets(folder)
            os._exit(code)

        own = msgspec.structs.replace(frontend_options(options, self.link_address), own_socket=True)
        self._frontends = Frontends(own, options.http.frontends, folder, restarts=False, failed=failed)

    def ended(self) -> bool:
        """Whether they have ended in order."""
        return self._frontends.code == 0

    def close(self) -> None:
        """Ends them."""
        self._frontends.close()
        lifeline.remove_sockets(self._folder)


def check_frontend(options: ServeOptions) -> None:
    """Raises ValueError for options that frontends could not start with, before ranks are started in vain."""
    http = frontend_options(options, "ipc:///not/yet")
    if http.tokenizer is not None:
        Tokenizer(Path(http.tokenizer))
        load_defaults(http)
    http.key()
    check_port(http.host, http.port)
    if http.client_endpoint is not None:
        check_free(http.client_endpoint)


def check_before_ranks(options: ServeOptions) -> None:
    """Raises ValueError or OSError for all mistakes that can be found before there are ranks."""
    options.check()
    model, _ = open_model(options)
    run_on = choose(options.run_on, _ranks_here(options))
    # Only ranks ask how much memory GPUs have, since asking takes some of it; so none is taken to be missing here.
    config = engine_config(options, model, run_on, MOST_MEMORY_BYTES if run_on == "gpu" else None)
    if run_on == "cpu":
        refuse_too_much(config.memory_bytes, _ranks_here(options) or 1)
    if environment.mpi_rank() == 0:
        if run_on == "gpu" and options.device is None:
            refuse_undescribed(options.folder, options.ranks)
        check_frontend(options)


def _ranks_here(options: ServeOptions) -> int | None:
    """Ranks on this machine; None if that is not known."""
    return environment.ranks_here() if environment.under_mpirun() else options.ranks


def tokenizer_folder(options: ServeOptions) -> Path | None:
    """The folder with tokenizer.json; None if there is none."""
    return open_engine(options.folder).tokenizer_dir if options.engine is not None else None


def frontend_options(options: ServeOptions, link_address: str) -> FrontendOptions:
    tokenizer = tokenizer_folder(options)
    return FrontendOptions(
        **msgspec.structs.asdict(options.http),
        engine=link_address,
        model_name=options.model_name,
        tokenizer=None if tokenizer is None else str(tokenizer),
        host=options.host,
        port=options.port,
        client_endpoint=options.client_endpoint,
        otlp_endpoint=options.otlp_endpoint,
        log_format=options.log_format,
        log_level=options.log_level,
    )


def serve_rank(options: ServeOptions, link_address: str | None = None, lifeline_path: str | None = None) -> NoReturn:
    """Serves as one rank of an mpirun, which this process is. link_address: where frontends connect; None: rank 0
    starts them itself."""
    rank = environment.mpi_rank()
    logs.configure(f"rank {rank}", level=options.log_level, form=options.log_format)
    if lifeline_path is not None:
        lifeline.hold(Path(lifeline_path), f"rank {rank}")
    frontends = OwnFrontends(options) if link_address is None and rank == 0 else None
    if frontends is not None:
        link_address = frontends.link_address

    def program(world: World) -> int:
        return _serve(world, options, link_address, frontends)

    run_under_mpi(program, options.step_deadline_s, STARTUP_DEADLINE_S, options.run_on)


def _serve(world: World, options: ServeOptions, link_address: str | None, frontends: OwnFrontends | None) -> int:
    model, source = open_model(options)
    run_on = run_on_of(world)
    config = engine_config(options, model, run_on, default_arena_bytes(world) if run_on == "gpu" else None)
    worker = start_worker(world, model, config, source, tokenizer_folder(options))
    if world.rank != 0:
        worker.follow()
        worker.runner.close()
        return 0
    assert link_address is not None
    if options.device:
        device = load_device(options.device)
    else:
        device = device_for(options.folder, options.ranks, gpu_name(world))
    config = dataclasses.replace(config, migration_bytes=device.migration_bytes)
    policy = cost_policy(model, config, device, Objective.parse(options.objective))
    orchestrator = Orchestrator.of(model, config, worker, policy)
    if options.layout.lower() != "auto":
        orchestrator.set_layout(options.layout, pin=True)
    tracer = None
    if options.trace is not None:
        sizes = model_sizes(model, config)
        tracer = StepTracer(Path(options.trace), config.num_ranks, sizes.row_bytes, sizes.itemsize)
        orchestrator.observer = tracer
    link = LinkServer(link_address)
    ready = ready_message(model, config, new_incarnation())
    warn_of_context(model, config, ready.max_context)
    server = EngineServer(orchestrator, link, ready, world.control, config.page_tokens)
    _announce(options, config, ready, orchestrator.mode)
    server.run(lambda: frontends is not None and frontends.ended())
    world.control.send(Kind.STOP)
    worker.runner.close()
    if tracer is not None:
        tracer.close()
    if frontends is not None:
        frontends.close()
    link.close()
    return 0


def _announce(options: ServeOptions, config: EngineConfig, ready: Ready, mode: str) -> None:
    """The one line of the log that says what serves here."""
    logs.event(
        log,
        logging.INFO,
        "serving",
        model=options.model_name,
        ranks=config.num_ranks,
        run_on=config.run_on,
        dtype=config.dtype,
        layout=config.layout.name.lower(),
        mode=mode,
        cache_tokens={name: room.total for name, room in ready.capacity.items()},
    )
