"""Checks the rules that keep the three packages readable, from their source alone, with the standard library alone.

1. Imports go one way: a module imports its own layer or a lower one (``LAYERS``), and no cycle exists.
2. Nobody imports ``engines`` or ``plugins`` by their folders' names: that would load a second copy of each module.
3. ``TORCH_FREE`` modules load no torch, neither themselves nor through what they import.
4. Imports stand at the top of a file, except those in ``LOCAL_IMPORTS``, each with its reason.
5. Only ``ENVIRONMENT_MODULE`` reads the environment.
6. Files have at most ``MAX_FILE_LINES`` lines and functions at most ``MAX_FUNCTION_LINES``
   (``MAX_KERNEL_LINES`` for Triton's).

Run it from anywhere: ``python scripts/check_imports.py [root]``. It prints ``file:line: rule`` for each violation and
exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from source_modules import Module, load_folder

# Module prefix -> layer. The longest prefix that fits a module decides.
LAYERS = {
    "splash_trt.request": 0,
    "splash_trt.plan": 0,
    "splash_trt.link": 0,
    "splash_trt.config": 0,
    "splash_trt.environment": 0,
    "splash_trt.observe": 0,
    "splash_trt.layout": 1,
    "splash_trt.cache": 1,
    "splash_trt.scheduler": 1,
    "splash_trt.migration": 1,
    "splash_trt.models.config": 1,
    "splash_trt.cache.storage": 2,
    "splash_trt.dist": 2,
    "splash_trt.memory": 2,
    "splash_trt.weights": 2,
    "splash_trt.models": 3,
    "splash_engines": 3,
    "splash_plugins": 3,
    "splash_trt.runtime": 4,
    "splash_trt.runtime.noise": 2,
    "splash_trt.migration.mover": 4,
    "splash_trt.migration.pieces": 4,
    "splash_trt.migration.peer_mover": 4,
    "splash_trt.migration.carrier": 4,
    "splash_trt.version": 0,
    "splash_trt.wording": 0,
    "splash_trt.interruption": 0,
    "splash_trt.worker": 5,
    "splash_trt.orchestrator": 5,
    "splash_trt.link_server": 5,
    "splash_trt.engine_server": 5,
    "splash_trt.lifeline": 5,
    "splash_trt.serve": 6,
    "splash_trt.supervise": 6,
    "splash_trt.frontends": 6,
    "splash_trt.__main__": 6,
    "splash_trt.launch": 5,
    "splash_trt.triton_backend": 6,
    "splash_trt.frontend": 6,
    "splash_trt.simulate": 6,
    "splash_trt.top": 6,
    "splash_trt.llm": 6,
    "splash_trt.cli": 6,
    "splash_trt.commands": 6,
    "splash_trt.options": 6,
    "splash_trt.calibrate": 6,
    "splash_trt.capacity": 6,
    # The package itself holds the version and the lazily loaded names for users.
    "splash_trt": 6,
}
# These prefixes stand only for the module of that name: a new module below them must be given its own layer.
EXACT_ONLY = {"splash_trt"}

# Package -> the folder of the tree that holds it.
PACKAGES = {"splash_trt": "splash_trt", "splash_engines": "engines", "splash_plugins": "plugins"}
FORBIDDEN_ROOTS = {"engines": "splash_engines", "plugins": "splash_plugins"}
# Folders outside of the packages in which rules 2 and 6 hold too.
OTHER_FOLDERS = ("tests", "scripts", "perf")

TORCH_FREE = (
    "splash_trt.layout",
    "splash_trt.scheduler",
    "splash_trt.migration.diff",
    "splash_trt.cache.directory",
    "splash_trt.cache.placement",
    "splash_trt.cache.page_table",
    "splash_trt.cache.pool",
)

# (importing module prefix, imported module prefix) -> why the import may be inside a function. "" fits all modules.
LOCAL_IMPORTS = {
    ("splash_trt", "splash_trt.llm"): "`import splash_trt` stays light: LLM is loaded at its first use",
    ("splash_trt", "splash_trt.request"): "as splash_trt.llm",
    ("", "mpi4py"): "importing mpi4py.MPI calls MPI_Init, which must come after children are spawned",
    ("", "splash_trt.dist.world_mpi"): "importing it makes the process a rank: it imports mpi4py.MPI",
    ("", "cuda"): "exists on machines with a GPU only",
    ("", "triton"): "exists on machines with a GPU only",
    ("", "tensorrt"): "an extra: probed when it is asked for",
    ("", "tensorrt_rtx"): "an extra: probed when it is asked for",
    ("", "tensorrt_llm"): "an extra: probed when it is asked for",
    ("", "matplotlib"): "an extra: only plots need it",
    ("splash_trt.runtime.make_runner", "splash_trt.runtime.gpu_runner"): "it loads kernels, which need Triton",
    ("splash_trt.cli", "splash_trt.commands.group"): "Ctrl-C while it is imported is answered as at any later time",
    ("splash_trt.commands", ""): "a command's help and completion need not wait for what runs it, such as torch",
    ("splash_trt.top.command", "splash_trt.top.screen"): "it loads rich, which other commands need not wait for",
    ("splash_trt.frontend", "splash_trt.observe.otel"): "an extra: OpenTelemetry is for who asks for it",
}

ENVIRONMENT_MODULE = "splash_trt.environment"
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 80
"""For functions that Triton compiles: their parameters take ten lines alone, and splitting them is often impossible."""


@dataclass(frozen=True)
class Violation:
    path: Path
    line: int
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}"


def has_prefix(module: str, prefix: str) -> bool:
    return not prefix or module == prefix or module.startswith(prefix + ".")


def layer_of(module: str) -> int | None:
    fitting = [p for p in LAYERS if module == p or (p not in EXACT_ONLY and has_prefix(module, p))]
    return LAYERS[max(fitting, key=len)] if fitting else None


def resolve(target: str, modules: dict[str, Module]) -> str | None:
    """The module of ours that importing ``target`` loads; None if it is none of ours.

    A target that is neither a module nor a name inside of one is returned as it is, so that its layer is checked.
    """
    if target.split(".")[0] not in PACKAGES:
        return None
    parent = target.rpartition(".")[0]
    if target in modules or parent not in modules:
        return target
    return parent


def check_layers(modules: dict[str, Module]) -> Iterator[Violation]:
    for module in modules.values():
        own = layer_of(module.name)
        if own is None:
            yield Violation(module.path, 1, f"{module.name} has no layer: add it to LAYERS in scripts/check_imports.py")
            continue
        for imported in module.imports:
            target = resolve(imported.target, modules)
            layer = layer_of(target) if target else None
            is_exception = imported.local and local_import_reason(module.name, imported.target)
            if layer is not None and layer > own and not is_exception:
                rule = f"{module.name} (layer {own}) must not import {target} (layer {layer}): imports go down"
                yield Violation(module.path, imported.line, rule)


def check_forbidden_roots(modules: list[Module]) -> Iterator[Violation]:
    for module in modules:
        for imported in module.imports:
            root = imported.target.split(".")[0]
            if root in FORBIDDEN_ROOTS:
                rule = f"import {FORBIDDEN_ROOTS[root]}, not {root}: that loads a second copy from the tree's root"
                yield Violation(module.path, imported.line, rule)


def local_import_reason(module: str, target: str) -> str | None:
    for (importer, prefix), reason in LOCAL_IMPORTS.items():
        importer_fits = module == importer if importer in EXACT_ONLY else has_prefix(module, importer)
        if importer_fits and has_prefix(target, prefix):
            return reason
    return None


def check_local_imports(modules: dict[str, Module]) -> Iterator[Violation]:
    for module in modules.values():
        for imported in module.imports:
            if imported.local and local_import_reason(module.name, imported.target) is None:
                rule = f"{imported.target} is imported inside a function; move it to the top of the file"
                yield Violation(module.path, imported.line, rule)


def edges_at_load(module: Module, modules: dict[str, Module]) -> Iterator[tuple[str, int]]:
    """Yields (module, or package that is not ours; line) for what loading ``module`` loads, its own packages first."""
    parts = module.name.split(".")
    for end in range(1, len(parts)):
        yield ".".join(parts[:end]), 1
    for imported in module.imports:
        if imported.typing_only or imported.local:
            continue
        target = resolve(imported.target, modules)
        if target is None:
            yield imported.target.split(".")[0], imported.line
            continue
        parts = target.split(".")
        for end in range(1, len(parts) + 1):
            yield ".".join(parts[:end]), imported.line


def check_torch_free(modules: dict[str, Module]) -> Iterator[Violation]:
    for module in modules.values():
        if not any(has_prefix(module.name, prefix) for prefix in TORCH_FREE):
            continue
        chains: dict[str, tuple[list[str], int]] = {module.name: ([module.name], 1)}
        waiting = [module.name]
        while waiting and "torch" not in chains:
            name = waiting.pop(0)
            chain, first_line = chains[name]
            if name not in modules:
                continue
            for target, line in edges_at_load(modules[name], modules):
                if target not in chains:
                    chains[target] = ([*chain, target], line if name == module.name else first_line)
                    waiting.append(target)
        if "torch" in chains:
            chain, line = chains["torch"]
            yield Violation(module.path, line, f"{module.name} must not load torch: {' -> '.join(chain)}")


def check_cycles(modules: dict[str, Module]) -> Iterator[Violation]:
    """Walks imports depth first; one of a module on the current path closes a cycle.

    A module does not count as importing its packages: an ``__init__`` that re-exports its modules is no cycle, unless
    one of them imports it by name. Imports for type checkers count, since these usually hide a cycle.
    """
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> Iterator[Violation]:
        done.add(name)
        for imported in modules[name].imports:
            target = resolve(imported.target, modules)
            if target not in modules or target == name or local_import_reason(name, imported.target):
                continue
            if target in path:
                cycle = " -> ".join([*path[path.index(target) :], target])
                yield Violation(modules[name].path, imported.line, f"import cycle: {cycle}")
            elif target not in done:
                yield from walk(target, [*path, target])

    for name in modules:
        if name not in done:
            yield from walk(name, [name])


def check_environment(modules: dict[str, Module]) -> Iterator[Violation]:
    rule = f"only {ENVIRONMENT_MODULE} reads the environment"
    for module in modules.values():
        if module.name == ENVIRONMENT_MODULE:
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "os" and node.attr in ENVIRONMENT_NAMES:
                    yield Violation(module.path, node.lineno, rule)
        for imported in module.imports:
            root, _, name = imported.target.partition(".")
            if root == "os" and name in ENVIRONMENT_NAMES:
                yield Violation(module.path, imported.line, rule)


def check_sizes(modules: list[Module]) -> Iterator[Violation]:
    for module in modules:
        if module.num_lines > MAX_FILE_LINES:
            rule = f"file has {module.num_lines} lines, more than {MAX_FILE_LINES}"
            yield Violation(module.path, MAX_FILE_LINES + 1, rule)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                most = MAX_KERNEL_LINES if _is_kernel(node) else MAX_FUNCTION_LINES
                if num_lines > most:
                    rule = f"function {node.name} has {num_lines} lines, more than {most}"
                    yield Violation(module.path, node.lineno, rule)


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is decorated with triton.jit or gluon.jit, with or without arguments."""
    names = {d.func if isinstance(d, ast.Call) else d for d in node.decorator_list}
    return any(isinstance(name, ast.Attribute) and name.attr == "jit" for name in names)


def check_tree(root: Path) -> list[Violation]:
    """All violations below ``root``, with paths as given by it, in order of file and line."""
    modules = {m.name: m for name, folder in PACKAGES.items() for m in load_folder(root / folder, name)}
    others = [m for folder in OTHER_FOLDERS for m in load_folder(root / folder, folder)]
    found = [
        *check_layers(modules),
        *check_forbidden_roots([*modules.values(), *others]),
        *check_torch_free(modules),
        *check_cycles(modules),
        *check_local_imports(modules),
        *check_environment(modules),
        *check_sizes([*modules.values(), *others]),
    ]
    return sorted(set(found), key=lambda v: (v.path, v.line, v.rule))


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[1]
    violations = check_tree(root)
    for violation in violations:
        print(violation)
    print(f"{len(violations)} violation(s) of the rules in scripts/check_imports.py")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
