"""The frontend's options. Those that `splash-trt serve` has too are HttpSettings; one table of flags serves both."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from splash_trt.config import MAX_DEADLINE_S
from splash_trt.frontend.client_socket import check_endpoint
from splash_trt.frontend.member import Member
from splash_trt.frontend.reading import REASONING_PARSERS, TOOL_PARSERS
from splash_trt.observe.log import FORMATS, LEVELS
from splash_trt.observe.spans import check_endpoint as check_collector

GENERATION_CONFIGS = ("auto", "none")

Command = TypeVar("Command", bound=Callable[..., Any])


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The options that `splash-trt serve` passes on. Wrong values raise ValueError naming the field."""

    frontends: int = 1
    """Processes that share the port."""
    max_queued: int = 1024
    """Requests that wait for their first token; more are refused with 429."""
    max_body_bytes: int = 16 << 20
    ready_deadline_s: float = 30.0
    """Not ready when there is work and no step completes for so long."""
    shutdown_deadline_s: float = 10.0
    """How long requests under way may take to finish after a signal; then they are cancelled."""
    api_key: str | None = None
    """What clients must send as a bearer token; None: nothing."""
    api_key_file: str | None = None
    """A file whose first line is the key. (Everybody on the machine can read a command line.)"""
    api_key_for_metrics: bool = False
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    generation_config: str = "auto"
    """"auto": generation_config.json in the checkpoint has the defaults of sampling parameters; "none": ignore it."""

    def __post_init__(self) -> None:
        for field in ("frontends", "max_queued", "max_body_bytes"):
            value = getattr(self, field)
            if not value > 0:
                raise ValueError(f"{field}: {value} is not allowed; it must be above 0")
        for field in ("ready_deadline_s", "shutdown_deadline_s"):
            value = getattr(self, field)
            if not 0 < value <= MAX_DEADLINE_S:
                most = f"{MAX_DEADLINE_S:.0f}"
                raise ValueError(f"{field}: {value} is not allowed; it must be above 0 and at most {most}")
        for field, allowed in CHOICES.items():
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"{field}: {value!r} is not allowed; it must be one of {', '.join(allowed)}")
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError("api_key: give the key or a file with it, not both")
        if self.api_key is not None:
            _check_key("api_key", self.api_key)

    def key(self) -> str | None:
        """The API key; None: no key is needed. Raises ValueError if its file has none."""
        if self.api_key_file is None:
            return self.api_key
        try:
            lines = Path(self.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"api_key_file: {self.api_key_file} cannot be read: {error}") from None
        key = lines[0].strip() if lines else ""
        _check_key("api_key_file", key)
        return key


class Options(HttpSettings, frozen=True, kw_only=True):
    """All options of a frontend's process."""

    engine: str
    """Where rank 0 listens: ipc:///path/of/socket."""
    model_name: str
    """The model's name for clients."""
    tokenizer: str | None = None
    """Folder with tokenizer.json; None: token ids only."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one."""
    client_endpoint: str | None = None
    """Where local clients (Triton's model) are served: ipc:///path or tcp://127.0.0.1:PORT; None: nowhere."""
    otlp_endpoint: str | None = None
    """The URL of an OTLP collector to which a span of each request is sent; None: nowhere."""
    log_format: str = "text"
    log_level: str = "info"
    lifeline: int | None = None
    """File descriptor of a pipe's reading end or of a socket; this process ends when the other end closes. What comes
    over a socket is sent back by the event loop, and ENDING (main.py) is sent when a signal asks for the end."""
    member: Member | None = None
    """None: there is only this frontend, which listens at host and port itself."""
    end_engine: bool = True
    """Whether to tell the engine to end when a signal ends this process."""
    own_socket: bool = False
    """Whether to remove the engine's socket and its folder if the process at the lifeline's other end could not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: {self.port} is not allowed; it must be from 0 to 65535")
        if self.client_endpoint is not None:
            check_endpoint(self.client_endpoint)
        if self.otlp_endpoint is not None:
            check_collector(self.otlp_endpoint)


CHOICES = {
    "tool_parser": TOOL_PARSERS,
    "reasoning_parser": REASONING_PARSERS,
    "generation_config": GENERATION_CONFIGS,
}


@dataclass(frozen=True)
class Flag:
    """A field of HttpSettings as a command-line option."""

    field: str
    help: str
    metavar: str | None = None

    @property
    def option(self) -> str:
        return "--" + self.field.removesuffix("_s").replace("_", "-")

    @property
    def default(self) -> Any:
        return getattr(HttpSettings(), self.field)

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)

    @property
    def kind(self) -> type:
        return str if self.default is None else type(self.default)


FLAGS = (
    Flag("frontends", "Processes that share the port, each good for some 20,000 tokens a second.", "K"),
    Flag("max_queued", "Requests that may wait for their first token, at all frontends together; more get a 429.", "N"),
    Flag("max_body_bytes", "Longest body of a request.", "BYTES"),
    Flag("ready_deadline_s", "Not ready when there is work and no step completes for so long.", "SECONDS"),
    Flag("shutdown_deadline_s", "For requests under way to finish in after SIGTERM.", "SECONDS"),
    Flag("api_key", "What clients must send as Authorization: Bearer KEY.", "KEY"),
    Flag("api_key_file", "A file whose first line is the key, so that no list of processes shows it.", "FILE"),
    Flag("api_key_for_metrics", "Ask for the key at /metrics too; health is always open."),
    Flag("tool_parser", "How the model writes tool calls; auto: as its tokenizer shows."),
    Flag("reasoning_parser", "Whether <think>...</think> is split off; auto: if the tokenizer knows it."),
    Flag("generation_config", "auto: generation_config.json has the defaults for temperature and so on."),
)


def http_options(command: Command) -> Command:
    """Adds FLAGS to a click command, as arguments named like HttpSettings' fields."""
    for flag in reversed(FLAGS):
        kinds: dict[str, Any] = {"type": flag.kind, "metavar": flag.metavar}
        if flag.is_switch:
            kinds = {"is_flag": True}
        elif flag.field in CHOICES:
            kinds = {"type": click.Choice(CHOICES[flag.field])}
        shows = flag.default is not None and not flag.is_switch
        decorate = click.option(
            flag.option, flag.field, default=flag.default, help=flag.help, show_default=shows, **kinds
        )
        command = decorate(command)
    return command


def take_settings(fields: dict[str, Any]) -> HttpSettings:
    """Removes the settings from a command's arguments, and returns them. Raises ValueError as HttpSettings does."""
    return HttpSettings(**{flag.field: fields.pop(flag.field) for flag in FLAGS})


def as_flags(settings: HttpSettings) -> list[str]:
    """The settings as command-line arguments."""
    flags: list[str] = []
    for flag in FLAGS:
        value = getattr(settings, flag.field)
        if value != flag.default:
            flags += [flag.option] if flag.is_switch else [flag.option, str(value)]
    return flags


def parse(argv: Sequence[str]) -> Options:
    """ValueError as Options; SystemExit for what is no flag."""
    parser = argparse.ArgumentParser(prog="python -m splash_trt.frontend.main", description="HTTP for one engine.")
    parser.add_argument("--engine", required=True, metavar="ADDRESS", help="ipc:///path/of/socket of rank 0")
    parser.add_argument("--model-name", required=True, metavar="NAME", help="the model's name for clients")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="folder with tokenizer.json; without: token ids only")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one (default: %(default)s)")
    parser.add_argument("--client-endpoint", metavar="ADDRESS", help="serve local clients here, such as Triton's model")
    parser.add_argument("--otlp-endpoint", metavar="URL", help="send a span a request to this OpenTelemetry collector")
    parser.add_argument("--log-format", choices=FORMATS, default=FORMATS[0])
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    parser.add_argument("--lifeline", type=int, metavar="FD", help="end when this pipe does")
    parser.add_argument("--member", metavar="JSON", help="one of several, started by what watches over them")
    parser.add_argument("--keep-engine", dest="end_engine", action="store_false", help="leave the engine running")
    parser.add_argument("--own-socket", action="store_true", help="remove the engine's socket at the end")
    for flag in FLAGS:
        kinds: dict[str, Any] = {"type": flag.kind, "metavar": flag.metavar, "choices": CHOICES.get(flag.field)}
        if flag.is_switch:
            kinds = {"action": "store_true"}
        parser.add_argument(flag.option, dest=flag.field, default=flag.default, help=flag.help, **kinds)
    fields = vars(parser.parse_args(argv))
    member = fields.pop("member")
    return Options(**fields, member=None if member is None else msgspec.json.decode(member, type=Member))


def _check_key(field: str, key: str) -> None:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{field}: a key is not allowed to be empty or to have spaces or characters beyond ASCII")
