"""The names of TensorRT's compiled module that the Python sources of `tensorrt.plugin` use, without TensorRT.

`install` makes `import tensorrt.plugin` load those sources, as they are, over this stub. `PluginLayer` then asks a
plugin what TensorRT asks it when it builds a network: data types, shapes, formats, how to launch, which kernel.
Dimensions are expressions that are evaluated when sizes are known, as TensorRT does with each run.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

Dim = int | str
"""A size, or the name of one that a profile bounds."""


class DataType(enum.Enum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8
    INT4 = 9


class DimensionOperation(enum.Enum):
    SUM = enum.auto()
    SUB = enum.auto()
    PROD = enum.auto()
    FLOOR_DIV = enum.auto()
    CEIL_DIV = enum.auto()
    MAX = enum.auto()
    MIN = enum.auto()
    EQUAL = enum.auto()
    LESS = enum.auto()


_OPERATIONS = {
    DimensionOperation.SUM: lambda a, b: a + b,
    DimensionOperation.SUB: lambda a, b: a - b,
    DimensionOperation.PROD: lambda a, b: a * b,
    DimensionOperation.FLOOR_DIV: lambda a, b: a // b,
    DimensionOperation.CEIL_DIV: lambda a, b: -(-a // b),
    DimensionOperation.MAX: max,
    DimensionOperation.MIN: min,
    DimensionOperation.EQUAL: lambda a, b: int(a == b),
    DimensionOperation.LESS: lambda a, b: int(a < b),
}


class IDimensionExpr:
    """An integer, a name, or an operation on two of these."""

    def __init__(self, value: Dim | tuple[DimensionOperation, IDimensionExpr, IDimensionExpr]) -> None:
        self._value = value

    def is_constant(self) -> bool:
        if isinstance(self._value, tuple):
            return self._value[1].is_constant() and self._value[2].is_constant()
        return isinstance(self._value, int)

    def get_constant_value(self) -> int:
        assert self.is_constant()
        return self.evaluate({})

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        if isinstance(self._value, tuple):
            operation, a, b = self._value
            return int(_OPERATIONS[operation](a.evaluate(sizes), b.evaluate(sizes)))
        return self._value if isinstance(self._value, int) else sizes[self._value]


class IExprBuilder:
    def constant(self, value: int) -> IDimensionExpr:
        return IDimensionExpr(int(value))

    def operation(self, op: DimensionOperation, a: IDimensionExpr, b: IDimensionExpr) -> IDimensionExpr:
        assert isinstance(a, IDimensionExpr) and isinstance(b, IDimensionExpr)
        return IDimensionExpr((op, a, b))


class Dims(list):  # type: ignore[type-arg]
    MAX_DIMS = 8


class DimsExprs(list):  # type: ignore[type-arg]
    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


class ISymExpr:
    type: Any
    dtype: Any
    expr: IDimensionExpr


@dataclass
class PluginTensorDesc:
    dims: Any = ()
    type: Any = None
    format: Any = None
    scale: float = 1.0


@dataclass
class DynamicPluginTensorDesc:
    desc: PluginTensorDesc
    min: Any = ()
    max: Any = ()
    opt: Any = ()


class _Numbers(np.ndarray):
    """As numpy's arrays were up to 2.3, one of a single number being a number: TensorRT 10's sources rely on it."""

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())


class PluginField:
    def __init__(self, name: str, data: Any, kind: Any) -> None:
        self.name, self.data, self.type = name, np.asarray(data).view(_Numbers), kind


class _Registry:
    def __init__(self) -> None:
        self._creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> None:
        # The real creator's name is an attribute that the sources set as "name" and then reuse for its fields.
        self._creators[creator.plugin_namespace, creator.plugin_version, namespace] = creator

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return self._creators[namespace, version, namespace]


class _Logger:
    WARNING = 1

    def log(self, severity: int, message: str) -> None:
        assert "experimental" in message, message


def _plain(name: str) -> type:
    return type(name, (), {"__init__": lambda self: None})


def _names() -> dict[str, Any]:
    formats = enum.Enum("TensorFormat", ["LINEAR", "CHW4", "HWC8"])
    requests = ["UNKNOWN", "PREFER_JIT", "PREFER_AOT", "STRICT_JIT", "STRICT_AOT"]
    fields = ["FLOAT16", "FLOAT32", "FLOAT64", "INT8", "INT16", "INT32", "INT64", "CHAR", "UNKNOWN"]
    registry = _Registry()
    interfaces = (
        "ITensor", "IPluginV3", "IPluginV3QuickCore", "IPluginV3QuickBuild", "IPluginV3QuickRuntime",
        "IPluginV3QuickAOTBuild", "IPluginCreatorV3Quick",
    )  # fmt: skip
    return {
        "DataType": DataType,
        "float32": DataType.FLOAT,
        "float16": DataType.HALF,
        "bfloat16": DataType.BF16,
        "int8": DataType.INT8,
        "int32": DataType.INT32,
        "int64": DataType.INT64,
        "DimensionOperation": DimensionOperation,
        "IDimensionExpr": IDimensionExpr,
        "IExprBuilder": IExprBuilder,
        "Dims": Dims,
        "DimsExprs": DimsExprs,
        "ISymExpr": ISymExpr,
        "PluginTensorDesc": PluginTensorDesc,
        "DynamicPluginTensorDesc": DynamicPluginTensorDesc,
        "PluginField": PluginField,
        "PluginFieldCollection": list,
        "PluginFieldType": enum.Enum("PluginFieldType", fields),
        "PluginArgType": enum.Enum("PluginArgType", ["INT"]),
        "PluginArgDataType": enum.Enum("PluginArgDataType", ["INT8", "INT16", "INT32"]),
        "TensorFormat": formats,
        "TensorRTPhase": enum.Enum("TensorRTPhase", ["BUILD", "RUNTIME"]),
        "QuickPluginCreationRequest": enum.Enum("QuickPluginCreationRequest", requests),
        "Logger": _Logger,
        "get_plugin_registry": lambda: registry,
        **{name: _plain(name) for name in interfaces},
    }


def install(bindings: Path) -> ModuleType:
    """bindings: the folder `tensorrt_bindings` of a TensorRT wheel. Returns `tensorrt.plugin`, freshly loaded."""
    for name in [n for n in sys.modules if n == "tensorrt" or n.startswith("tensorrt.")]:
        del sys.modules[name]
    stub = ModuleType("tensorrt")
    stub.__path__ = [str(bindings)]
    stub.__dict__.update(_names())
    sys.modules["tensorrt"] = stub
    return __import__("tensorrt.plugin", fromlist=["op"])


@dataclass(frozen=True)
class Launch:
    """What TensorRT would launch for given sizes."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    scalars: tuple[int, ...]


class PluginLayer:
    """One plugin layer of a network that is built: what TensorRT learns of it, and what it launches when it runs."""

    def __init__(
        self, plugin_id: str, inputs: Sequence[tuple[Sequence[Dim], DataType]], attributes: Mapping[str, Any]
    ) -> None:
        trt = sys.modules["tensorrt"]
        namespace, name = plugin_id.split("::")
        definition = getattr(getattr(trt.plugin.op, namespace), name)
        # As trt.INetworkDefinition.add_plugin(…, aot=True) does with what the definition returns.
        creator = trt.plugin._lib.QDP_CREATORS
        trt.get_plugin_registry().get_creator = lambda name, version, ns: creator[f"{ns}::{name}"]
        create = definition(*[trt.ITensor() for _ in inputs], **attributes)
        self.plugin = create(trt.QuickPluginCreationRequest.STRICT_AOT)[2]
        self._trt = trt
        types = [dtype for _, dtype in inputs]
        self.output_types = self.plugin.get_output_data_types(types, [len(dims) for dims, _ in inputs])
        self.aliases = [self.plugin.get_aliased_input(i) for i in range(len(self.output_types))]
        builder = IExprBuilder()
        self._inputs = [[IDimensionExpr(d) for d in dims] for dims, _ in inputs]
        self._outputs = self.plugin.get_output_shapes(self._inputs, [], builder)
        self._describe(types, builder)

    def _describe(self, types: Sequence[DataType], builder: IExprBuilder) -> None:
        linear = self._trt.TensorFormat.LINEAR
        described = [
            DynamicPluginTensorDesc(
                PluginTensorDesc([d.evaluate({}) if d.is_constant() else -1 for d in dims], dtype, linear)
            )
            for dims, dtype in zip([*self._inputs, *self._outputs], [*types, *self.output_types], strict=True)
        ]
        inputs, outputs = described[: len(types)], described[len(types) :]
        formats = self.plugin.get_supported_format_combinations(described, len(types))
        assert [f.type for f in formats] == [d.desc.type for d in described]
        self.plugin.configure_plugin(inputs, outputs)
        self.plugin.set_tactic(0)
        self._launch = SimpleNamespace()
        self._scalars: dict[int, Any] = {}
        setter = _Setter(self._scalars)
        self.plugin.get_launch_params(self._inputs, described, len(types), self._launch, setter, builder)
        assert len(self._scalars) == setter.nbSymExprs, "as many scalars as were announced"
        self.kernel_name, ptx = self.plugin.get_kernel([d.desc for d in inputs], [d.desc for d in outputs])
        self.ptx = ptx.decode()

    def output_shapes(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        return [tuple(d.evaluate(sizes) for d in dims) for dims in self._outputs]

    def launch(self, sizes: Mapping[str, int]) -> Launch:
        p = self._launch
        grid, block = (p.grid_x, p.grid_y, p.grid_z), (p.block_x, p.block_y, p.block_z)
        return Launch(
            tuple(g.expr.evaluate(sizes) for g in grid),  # type: ignore[arg-type]
            tuple(b.expr.evaluate(sizes) for b in block),  # type: ignore[arg-type]
            p.shared_mem.expr.evaluate(sizes),
            tuple(self._scalars[i].expr.evaluate(sizes) for i in range(len(self._scalars))),
        )


class _Setter:
    nbSymExprs = 0

    def __init__(self, into: dict[int, Any]) -> None:
        self._into = into

    def __setitem__(self, index: int, value: Any) -> None:
        assert value.dtype.name == "INT32", "ahead-of-time kernels take 32-bit scalars"
        self._into[index] = value
