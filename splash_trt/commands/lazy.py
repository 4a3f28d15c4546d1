"""A click group whose commands' modules are loaded when one is invoked: listing and completing commands loads none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem


@dataclass(frozen=True)
class Entry:
    """What is known of a command before it is loaded."""

    place: str
    """module:attribute."""
    help: str
    """The first sentence of the command's help, shown in the group's list."""
    hidden: bool = False

    def load(self) -> click.Command:
        module, _, attribute = self.place.partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command), self.place
        return command


class LazyGroup(click.Group):
    """`table`: {name: entry} of all commands. Those that were loaded are in `commands`, as in any group."""

    def __init__(self, *args: Any, table: Mapping[str, Entry], **more: Any) -> None:
        super().__init__(*args, **more)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.table, *self.commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands and cmd_name in self.table:
            self.add_command(self.table[cmd_name].load(), cmd_name)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(self._visible())

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        named = [CompletionItem(name, help=text) for name, text in self._visible() if name.startswith(incomplete)]
        return [*named, *click.Command.shell_complete(self, ctx, incomplete)]

    def _visible(self) -> list[tuple[str, str]]:
        return [(name, entry.help) for name, entry in sorted(self.table.items()) if not entry.hidden]
