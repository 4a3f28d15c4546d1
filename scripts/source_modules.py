"""Finds a source tree's modules and what each imports, from their source alone, with only the standard library."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """One imported name. ``target`` is the dotted name, with relative imports resolved."""

    target: str
    line: int
    local: bool
    typing_only: bool


@dataclass
class Module:
    """One source file. ``name`` is the dotted name by which it is imported; for an ``__init__``, the package's."""

    name: str
    path: Path
    tree: ast.Module
    num_lines: int
    imports: list[Import] = field(default_factory=list)


class ImportCollector(ast.NodeVisitor):
    """Collects a file's imports, including those by ``import_module("literal")``."""

    def __init__(self, module: str, is_package: bool) -> None:
        self.package = module if is_package else module.rpartition(".")[0]
        self.imports: list[Import] = []
        self.function_depth = 0
        self.typing_depth = 0

    def add(self, target: str, line: int) -> None:
        self.imports.append(Import(target, line, self.function_depth > 0, self.typing_depth > 0))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parents = self.package.split(".")
            kept = parents[: len(parents) - node.level + 1]
            base = ".".join([*kept, base]) if base else ".".join(kept)
        for alias in node.names:
            self.add(base if alias.name == "*" else f"{base}.{alias.name}", node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
            self.add(str(node.args[0].value), node.lineno)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        is_typing = ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        self.typing_depth += is_typing
        for statement in node.body:
            self.visit(statement)
        self.typing_depth -= is_typing
        for statement in node.orelse:
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        self.function_depth += 1
        self.generic_visit(node)
        self.function_depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef


def load_module(path: Path, name: str) -> Module:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source, filename=str(path))
    collector = ImportCollector(name, path.name == "__init__.py")
    collector.visit(tree)
    return Module(name, path, tree, len(source.splitlines()), collector.imports)


def load_folder(folder: Path, name: str) -> Iterator[Module]:
    """Yields the modules below ``folder``, named as if ``folder`` were the package ``name``."""
    for path in sorted(folder.rglob("*.py")):
        parts = list(path.relative_to(folder).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        yield load_module(path, ".".join([name, *parts]))
