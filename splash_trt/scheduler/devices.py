"""Descriptions of devices: built in, in JSON files, and of the machine at hand."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import reprlib
import tempfile
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from splash_trt.config import FORMATS
from splash_trt.scheduler.device import KINDS, Device

_REQUIRED = (
    "name", "origin", "memory_bytes", "flops", "memory_bytes_s", "link_bytes_s", "collective_s", "collective_hop_s",
    "operation_s", "step_s",
)  # fmt: skip
_RATES = ("memory_bytes_s", "link_bytes_s")
_POSITIVE = ("operation_s", "step_s", "collective_s")
_NOT_NEGATIVE = ("memory_bytes", "collective_hop_s", "expert_s")

# Far beyond what any device has, and near enough that no sum, product or quotient of a cost model's overflows.
_LEAST_RATE = 1.0
_MOST = 1e30
_MOST_SECONDS = 1e3
_MOST_FACTOR = 1e6
_MOST_RANKS = 1 << 20

_GPUS = Path("/proc/driver/nvidia/gpus")

# What two and four H200s reached of their datasheets' figures; other GPUs of the family are taken to reach as much.
MEMORY_REACHED = 4.3 / 4.8
PRODUCTS_REACHED = 785 / 989
LINK_REACHED = 369 / 450

_MEASURED_FACTORS = {
    "collective": 369 / 315,
    "copies": 1.75,
    "gemm": 1.4,
    "experts": 1.07,
    "decode": 1.03,
    "prefill": 1.3,
    "elementwise": 1.5,
}
_FACTORS_ORIGIN = (
    "Sums of two ranks' rows over mapped memory inside a CUDA graph: 3.4 to 3.7 us for 1 to 16 rows of 2,048 bfloat16, "
    "4.0 within steps, 107 for 8,192, which is 315 GB/s where a peer copy reached 369. Each further rank: 0.9 us, as "
    "symmetric memory among two (6.8) and four (8.6). Copies: 64 MB a step cost 2.1 % of 1.25 ms. The rest describes "
    "whole steps of GLM-4.7-Flash (two ranks, bfloat16, uniform routing, experts cut inside) in November 2026: decode "
    "steps of all four layouts, 1 to 512 requests of 512 to 4,096 tokens, by the GPU's clock, with a median error of "
    "1.7 % (TP, DP and CP at most 7 but for four requests in DP; DOP up to 14 less, from steps that cut its contexts "
    "into too few parts) and of 1.4 % in what they take over TP's; first tokens of prompts of 512 to 15,000 tokens, "
    "which include what a first step waits for, 4 % (512 tokens 10 to 20 less). "
    "What single kernels reached: experts 4.0 TB/s for 16 tokens and 603 TFLOP/s for 8,192, decode attention 3.4 TB/s "
    "for 512 requests, products with few rows 1.3 to 2.2 TB/s, prefill attention 500 to 675 TFLOP/s."
)


def _gpu(name: str, *, origin: str, gib: int, memory: float, bf16: float, fp8: float, fp32: float, fp64: float,
         link: float) -> Device:  # fmt: skip
    """memory, link in bytes/s and products in operations/s as datasheets give them, dense, one way."""
    return Device(
        name=name,
        origin=f"{origin} {_FACTORS_ORIGIN}",
        memory_bytes=gib << 30,
        flops={
            "bfloat16": bf16 * PRODUCTS_REACHED,
            "fp8": fp8 * PRODUCTS_REACHED,
            "float32": fp32 * PRODUCTS_REACHED,
            "float64": fp64 * PRODUCTS_REACHED,
        },
        memory_bytes_s=memory * MEMORY_REACHED,
        link_bytes_s=link * LINK_REACHED,
        collective_s=4.0e-6,
        collective_hop_s=0.9e-6,
        operation_s=2.5e-6,
        step_s=100e-6,
        factors=dict(_MEASURED_FACTORS),
    )


_SCALED = (
    "Datasheet figures, dense and one way, times what an H200 was measured to reach of its own (memory 4.3 of 4.8 "
    "TB/s, products 785 of 989 TFLOP/s, link 369 of 450 GB/s); this device itself was not measured."
)

BUILT_IN: dict[str, Device] = {
    "h200": _gpu(
        "h200", gib=139, memory=4.8e12, bf16=989e12, fp8=1979e12, fp32=67e12, fp64=67e12, link=450e9,
        origin="H200 SXM, 141 GB HBM3e, NVLink 4. Measured in November 2026 on two and four of them: copies 4.3 TB/s, "
        "bf16 products 770 to 800 TFLOP/s, peer copies 369 GB/s one way. The other formats' rates are the datasheet's, "
        "less by the ratio that bf16 reached.",
    ),
    "h100": _gpu(
        "h100", gib=79, memory=3.35e12, bf16=989e12, fp8=1979e12, fp32=67e12, fp64=67e12, link=450e9,
        origin=f"H100 SXM, 80 GB HBM3, NVLink 4. {_SCALED}",
    ),
    "b200": _gpu(
        "b200", gib=178, memory=8e12, bf16=2.25e15, fp8=4.5e15, fp32=80e12, fp64=40e12, link=900e9,
        origin=f"B200, 192 GB HBM3e (178 GiB), NVLink 5. {_SCALED}",
    ),
    "cpu": Device(
        name="cpu",
        origin="One core of a shared x86-64 server for each rank, the plain torch reference, Open MPI over shared "
        "memory: round figures of such a machine, so that simulations are the same everywhere. To serve, calibrate.",
        memory_bytes=0,
        flops={"float64": 2.5e10, "float32": 5e10, "bfloat16": 5e10, "fp8": 5e10},
        memory_bytes_s=8e9,
        link_bytes_s=2e9,
        collective_s=150e-6,
        collective_hop_s=60e-6,
        operation_s=15e-6,
        step_s=1.5e-3,
        factors={"copies": 4.0, "prefill": 3.0, "decode": 3.0, "experts": 1.5},
        expert_s=60e-6,
        padded=True,
    ),
}  # fmt: skip


def this_cpu(
    *,
    cores: int | None = None,
    memory_bytes_s: float | None = None,
    float32_flops: float | None = None,
) -> Device:
    """The machine at hand, for ranks on its cores: "cpu", with a product and a copy timed here (20 ms each) where no
    figure is given, and as many ranks at a time as this process may use cores."""
    base = BUILT_IN["cpu"]
    count = cores if cores is not None else len(os.sched_getaffinity(0))
    flops = float32_flops if float32_flops is not None else _product_rate()
    memory = memory_bytes_s if memory_bytes_s is not None else _copy_rate()
    values = {f.name: getattr(base, f.name) for f in fields(Device)} | dict(
        name="this CPU",
        origin=f"{platform.machine()} with {count} cores; one core's product and copy as timed or given "
        f"({flops / 1e9:.1f} GFLOP/s in float32, {memory / 1e9:.1f} GB/s), everything else as for cpu.",
        flops={"float64": flops / 2, "float32": flops, "bfloat16": flops, "fp8": flops},
        memory_bytes_s=memory,
        concurrent_ranks=count,
    )
    return Device(**values)


def _product_rate() -> float:
    """Operations a second of a product of two 256 x 256 matrices in float32."""
    size = 256
    a = np.ones((size, size), np.float32)
    return 2 * size**3 / _shortest(lambda: a @ a)


def _copy_rate() -> float:
    """Bytes a second, read and written, of a copy of 16 MiB."""
    num_bytes = 1 << 24
    a, b = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    return 2 * num_bytes / _shortest(lambda: np.copyto(b, a))


def _shortest(call: Any) -> float:
    """Seconds of the shortest of the calls that fit into 20 ms; one comes before, untimed."""
    call()
    best, end = math.inf, time.perf_counter() + 0.02
    while time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


# Files


def load_device(name_or_path: str | Path) -> Device:
    """A built-in description by its name in any case, or that of a JSON file. ValueError says what is wrong with it."""
    text = str(name_or_path)
    if text.lower() in BUILT_IN:
        return BUILT_IN[text.lower()]
    path = Path(name_or_path)
    if not os.path.isfile(path):  # Path's own raises for a name that no file can have
        names = ", ".join(sorted(BUILT_IN))
        raise ValueError(
            f"device: {text!r} is neither one of {names} nor a file; splash-trt calibrate writes such a file"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"device: {path} is no JSON: {error}; calibrate again to replace it") from error
    return parse_device(value, str(path))


def parse_device(value: object, where: str) -> Device:
    """A description from plain JSON values; ValueError names `where`, the field and the remedy."""
    if not isinstance(value, dict):
        raise ValueError(f"device: {where} holds no object with the fields {', '.join(_REQUIRED)}")
    known = {f.name for f in fields(Device)}
    for name in sorted(set(value) - known):
        raise ValueError(f"device: {where}: unknown field {name!r}; remove it (known: {', '.join(sorted(known))})")
    for name in _REQUIRED:
        if name not in value:
            raise ValueError(f"device: {where}: field {name!r} is missing; add it")
    _check_text(value, where)
    for name in _RATES:
        _check_number(value[name], f"device: {where}: {name}", least=_LEAST_RATE, most=_MOST)
    for name in (*_POSITIVE, *_NOT_NEGATIVE):
        if name in value:
            least = 0.0 if name in _NOT_NEGATIVE else None
            most = _MOST if name == "memory_bytes" else _MOST_SECONDS
            _check_number(value[name], f"device: {where}: {name}", least=least, most=most)
    if not isinstance(value["memory_bytes"], int):
        raise ValueError(f"device: {where}: memory_bytes: {value['memory_bytes']!r} is no whole number of bytes")
    ranks = value.get("concurrent_ranks")
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= _MOST_RANKS):
        allowed = f"neither null nor a whole number from 1 to {_MOST_RANKS}"
        raise ValueError(f"device: {where}: concurrent_ranks: {reprlib.repr(ranks)} is {allowed}")
    if not isinstance(value.get("padded", False), bool):
        raise ValueError(f"device: {where}: padded: {value['padded']!r} is neither true nor false")
    _check_table(value["flops"], f"device: {where}: flops", FORMATS, least=_LEAST_RATE, most=_MOST)
    if not value["flops"]:
        raise ValueError(f"device: {where}: flops: is empty; give at least one of {', '.join(FORMATS)}")
    _check_table(value.get("factors", {}), f"device: {where}: factors", KINDS, least=0.0, most=_MOST_FACTOR)
    return Device(**value)


def _check_text(value: dict[str, Any], where: str) -> None:
    for name in ("name", "origin"):
        if not isinstance(value[name], str) or not value[name]:
            raise ValueError(f"device: {where}: {name}: {value[name]!r} is no text; say what it describes")
    provenance = value.get("provenance", {})
    if not isinstance(provenance, dict) or not all(isinstance(v, str | int | float) for v in provenance.values()):
        raise ValueError(f"device: {where}: provenance: is no object of texts and numbers")


def _check_table(value: object, field: str, names: tuple[str, ...], *, least: float, most: float) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{field}: {value!r} is no object with numbers for {', '.join(names)}")
    for name, number in value.items():
        if name not in names:
            raise ValueError(f"{field}: {name!r} is not one of {', '.join(names)}; remove it")
        _check_number(number, f"{field}.{name}", least=least, most=most)


def _check_number(value: object, field: str, *, least: float | None, most: float) -> None:
    """least: None for a number above 0, however small."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and (least or 0) <= value <= most
    if not fits or (value == 0 and least is None):
        allowed = f"above 0 and at most {most:g}" if least is None else f"from {least:g} to {most:g}"
        raise ValueError(f"{field}: {reprlib.repr(value)} is no number {allowed}; correct it, or calibrate again")


def save_device(device: Device, path: Path) -> None:
    """Write the JSON that load_device reads; the file is there whole or not at all."""
    data = json.dumps(asdict(device), indent=1, allow_nan=False) + "\n"
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def device_for(engine_folder: Path, num_ranks: int, gpu: str | None) -> Device:
    """What an engine's ranks run on: its calibration for so many ranks if there is one (ValueError if it is damaged),
    else this machine's processor, or their GPU's built-in description (ValueError if it has none).

    gpu: what the driver calls it, as dist.place.gpu_name asks on a rank; None: they have none.
    """
    path = calibration_file(engine_folder, num_ranks)
    if path.exists():
        return load_device(path)
    return this_cpu() if gpu is None else described_gpu(gpu)


def described_gpu(name: str) -> Device:
    """The built-in description of a GPU, by what the driver calls it; ValueError if there is none."""
    if (found := _description(name)) is None:
        raise ValueError(
            f"device: there is no description of this machine's {name}; name one of {', '.join(BUILT_IN)}, or a file"
        )
    return found


def refuse_undescribed(engine_folder: Path, num_ranks: int) -> None:
    """ValueError if device_for would raise one on ranks with GPUs, as far as that is known before there are ranks.

    The system is asked, not the driver: that would initialise CUDA in a process that has no use for it. Not every
    system lists its GPUs, and of those listed ranks may get any; what is left open the ranks find out.
    """
    path = calibration_file(engine_folder, num_ranks)
    if path.exists():
        load_device(path)
        return
    texts = (file.read_text() for file in sorted(_GPUS.glob("*/information")))
    names = [model[1] for text in texts if (model := re.search(r"^Model:\s*(.*)$", text, re.MULTILINE))]
    if names and all(_description(name) is None for name in names):
        described_gpu(names[0])


def _description(gpu: str) -> Device | None:
    words = gpu.upper().split()
    return next((device for key, device in BUILT_IN.items() if key.upper() in words), None)


def calibration_file(engine_folder: Path, num_ranks: int) -> Path:
    """Where the calibration of an engine for so many ranks is kept."""
    return engine_folder / f"device-{num_ranks}.json"


def calibrated_ranks(engine_folder: Path) -> list[int]:
    """The numbers of ranks that an engine has calibrations for."""
    found = (re.fullmatch(r"device-([1-9]\d*)\.json", file.name) for file in engine_folder.iterdir())
    return sorted(int(match[1]) for match in found if match)
