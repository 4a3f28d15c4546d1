"""Rank 0's serving loop: takes frontends' messages, drives the orchestrator, and sends each frontend the news of each
step."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable

import msgspec
import numpy as np

from splash_trt.config import EngineConfig
from splash_trt.dist.control import Control
from splash_trt.layout.switch import State
from splash_trt.link import (
    Cancel,
    Decided,
    Explain,
    Explanation,
    Frames,
    LayoutCapacity,
    LayoutReply,
    Ready,
    SetLayout,
    Shutdown,
    Status,
    Submit,
    SwitchReport,
    ToEngine,
    Totals,
    in_columns,
)
from splash_trt.link_server import LinkServer
from splash_trt.memory.map import capacity, request_tokens
from splash_trt.models.config import ModelConfig
from splash_trt.observe.log import SwitchLines, event
from splash_trt.orchestrator import Orchestrator, Turn
from splash_trt.request import FinishReason, Request, TokenDelta

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.05
RECENT_SWITCHES = 4  # so many of the latest switches are looked at for news


def ready_message(model: ModelConfig, config: EngineConfig, incarnation: str) -> Ready:
    """What this deployment serves."""
    layouts = {layout.name.lower(): capacity(model, config, layout) for layout in config.allowed_layouts}
    return Ready(
        incarnation=incarnation,
        vocab_size=model.vocab_size,
        max_context=min(config.context_of(model.max_positions), request_tokens(model, config)),
        eos_token_ids=model.eos_token_ids,
        num_ranks=config.num_ranks,
        layouts=tuple(layouts),
        capacity={
            name: LayoutCapacity(
                tuple(pages * room.page_tokens for pages in room.pages_per_rank),
                room.total_tokens,
                room.request_tokens,
            )
            for name, room in layouts.items()
        },
    )


class EngineServer:
    """Serves until a frontend sends Shutdown or `ended` says so.

    The scheduler knows requests by names that are made here, so that ids of two frontends never collide.
    """

    def __init__(
        self, orchestrator: Orchestrator, link: LinkServer, ready: Ready, control: Control, page_tokens: int
    ) -> None:
        self._orchestrator = orchestrator
        self._link = link
        self._control = control
        self._ready = ready
        self._page_tokens = page_tokens
        self._clients: set[bytes] = set()
        self._names: dict[tuple[bytes, str], str] = {}  # by client and its id
        self._requests: dict[str, tuple[bytes, str, int | None]] = {}  # by name: client, its id, Submit.number
        self._count = 0
        self._totals: Totals = {}
        self._reported: dict[int, tuple[object, ...]] = {}  # of the latest switches: {number: what was reported}
        self._switch_lines = SwitchLines(log)
        self._stopping = False
        self._draining = False

    def run(self, ended: Callable[[], bool]) -> None:
        """Serve. ended() is asked between steps; it may raise."""
        while not self._stopping and not ended():
            idle = self._orchestrator.idle
            if idle and self._draining:
                return
            for client, message in self._link.poll(IDLE_POLL_S if idle else 0):
                self._handle(client, message)
            if self._orchestrator.idle:
                self._switch_lines.flush()
                self._control.progress()
            else:
                self._tell(self._orchestrator.turn())
                self._report_switches()

    def _handle(self, client: bytes, message: ToEngine | None) -> None:
        self._clients.add(client)
        if message is None:
            self._link.send(client, self._ready)
            # A new frontend should know the layout, also while the engine is idle and has no step to report.
            self._link.send(client, msgspec.structs.replace(self._frames(Turn(), []), totals=dict(self._totals)))
            self._tell_past_switches(client)
        elif isinstance(message, Submit):
            self._submit(client, message.request, message.number)
        elif isinstance(message, Cancel):
            name = self._names.get((client, message.request_id))
            if name is not None:
                self._tell(Turn(deltas=self._orchestrator.cancel(name)))
        elif isinstance(message, SetLayout):
            self._set_layout(client, message)
        elif isinstance(message, Explain):
            report = self._orchestrator.explain()
            self._link.send(client, Explanation(self._ready.incarnation, message.token, report))
        elif isinstance(message, Shutdown):
            self._draining = True
            self._stopping = not message.drain

    def _submit(self, client: bytes, request: Request, number: int | None) -> None:
        key = (client, request.id)
        if self._draining or key in self._names:
            why = "the engine is ending" if self._draining else f"id: {request.id!r} is still running"
            self._refuse(client, request.id, why)
            return
        self._count += 1
        name = f"{self._count:012d}"
        sampling = msgspec.structs.replace(request.sampling, seed=request.seed)
        try:
            self._orchestrator.add(msgspec.structs.replace(request, id=name, sampling=sampling))
        except ValueError as error:
            self._refuse(client, request.id, str(error))
            return
        self._names[key], self._requests[name] = name, (*key, number)

    def _refuse(self, client: bytes, request_id: str, why: str) -> None:
        # Logs only the field's name: the rest of the message may quote a prompt.
        event(log, logging.DEBUG, "refused", request=request_id, field=why.partition(":")[0])
        delta = TokenDelta(request_id, (), finish=FinishReason.ERROR, error=why)
        self._link.send(client, self._frames(Turn(), [(None, delta)]))

    def _set_layout(self, client: bytes, message: SetLayout) -> None:
        error = None
        try:
            self._orchestrator.set_layout(message.layout, pin=message.pin)
        except ValueError as refusal:
            error = str(refusal)
        if error is None:
            self._tell(Turn())  # before the answer, so that whoever has it finds what it changed
        self._link.send(client, LayoutReply(self._ready.incarnation, message.token, error))

    def _tell(self, turn: Turn) -> None:
        """Send each client its deltas and the present status."""
        if turn.decision is not None:
            source, decision = turn.decision
            ends = {"source": source.name.lower(), "target": decision.layout.name.lower()}
            event(log, logging.INFO, "decision", **ends, kind=decision.kind, why=decision.why)
        by_client: dict[bytes, list[tuple[int | None, TokenDelta]]] = {client: [] for client in self._clients}
        for delta in turn.deltas:
            client, request_id, number = self._requests[delta.request_id]
            by_client[client].append((number, msgspec.structs.replace(delta, request_id=request_id)))
            if delta.finish is not None:
                self._end(delta.request_id)
        status, num_output = self._status(), sum(len(delta.tokens) for delta in turn.deltas)
        for key, count in self._frames(turn, [], status).counts.items():
            self._totals[key] = self._totals.get(key, 0.0) + count
        for client, deltas in by_client.items():
            if not self._link.send(client, self._frames(turn, deltas, status, num_output)):
                self._forget(client)

    def _end(self, name: str) -> None:
        client, request_id, _ = self._requests.pop(name)
        del self._names[client, request_id]

    def _forget(self, client: bytes) -> None:
        """The client went away: cancel its requests."""
        self._clients.discard(client)
        for key, name in list(self._names.items()):
            if key[0] == client:
                self._orchestrator.cancel(name)
                self._end(name)

    def _frames(
        self,
        turn: Turn,
        deltas: list[tuple[int | None, TokenDelta]],
        status: Status | None = None,
        num_output: int = 0,
    ) -> Frames:
        """deltas: one client's, with their requests' numbers. num_output: tokens for all clients."""
        numbers, tokens, others = in_columns(deltas)
        return Frames(
            incarnation=self._ready.incarnation,
            step=turn.step,
            num_tokens=turn.num_tokens,
            seconds=turn.seconds,
            status=status or self._status(),
            deltas=others,
            numbers=numbers,
            tokens=tokens,
            num_elsewhere=max(0, num_output - sum(len(delta.tokens) for _, delta in deltas)),
            layout="" if turn.layout is None else turn.layout.name.lower(),
            preemptions=turn.preemptions,
            decision=_decided(turn),
        )

    def _status(self) -> Status:
        scheduler = self._orchestrator.scheduler
        switcher, directory = scheduler.switcher, scheduler.directory
        state, record = switcher.told_state, switcher.record
        limits = directory.limits()
        tokens = self._page_tokens
        return Status(
            layout=scheduler.layout.name.lower(),
            epoch=switcher.epoch,
            switch=state.value,
            switch_target=switcher.told_target,
            switch_progress=record.progress if record else float(state is State.STEADY),
            mode=self._orchestrator.mode,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            running_by_rank=tuple(scheduler.running_by_rank.tolist()),
            used_tokens=tuple(((limits - directory.free_pages()) * tokens).tolist()),
            total_tokens=tuple(np.multiply(limits, tokens).tolist()),
        )

    def _report_switches(self) -> None:
        """Tell every client when a switch begins, when it ends, and when its stall is known, which is a step later."""
        records = self._orchestrator.scheduler.switcher.records
        latest = [records[-i] for i in range(1, min(RECENT_SWITCHES, len(records)) + 1)]
        told, self._reported = self._reported, {}
        for record in latest:
            news = (record.outcome, record.ended, record.stall_s)
            self._reported[record.number] = news
            if told.get(record.number) != news:
                report = SwitchReport(self._ready.incarnation, record.number, msgspec.to_builtins(record))
                self._switch_lines.told(report.record)
                for client in self._clients:
                    self._link.send(client, report)

    def _tell_past_switches(self, client: bytes) -> None:
        """Tell a new client of the switches so far; later news of them will come as to all clients."""
        for record in self._orchestrator.scheduler.switcher.records:
            plain = msgspec.to_builtins(record)
            self._link.send(client, SwitchReport(self._ready.incarnation, record.number, plain, is_past=True))


def _decided(turn: Turn) -> Decided | None:
    if turn.decision is None:
        return None
    source, decision = turn.decision
    return Decided(source.name.lower(), decision.layout.name.lower(), decision.kind)


def new_incarnation() -> str:
    return uuid.uuid4().hex
