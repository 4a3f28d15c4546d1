"""Mistakes to plant in a program: functions that are given something else than they should be, or give it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from splash_engines.kernels_reference import REFERENCE

Plant = Callable[[ExitStack], None]
Edit = Callable[[Any], Any]


def put(target: str, value: Any) -> Plant:
    """Something else under a dotted name."""

    def plant(stack: ExitStack) -> None:
        stack.enter_context(patch(target, value))

    return plant


def kernel(name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Plant:
    """Another kernel in the table of ranks that start from now on."""
    kernels = replace(REFERENCE, **{name: change(getattr(REFERENCE, name))})
    return put("splash_trt.runtime.cpu_runner.REFERENCE", kernels)


def given(function: Callable[..., Any], **edits: Edit) -> Callable[..., Any]:
    """`function`, which gets something else for the arguments of these names."""
    signature = inspect.signature(function)

    def call(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options)
        for name, edit in edits.items():
            bound.arguments[name] = edit(bound.arguments[name])
        return function(*bound.args, **bound.kwargs)

    return call


def giving(function: Callable[..., Any], edit: Edit) -> Callable[..., Any]:
    """`function`, which returns something else."""
    return lambda *arguments, **options: edit(function(*arguments, **options))
