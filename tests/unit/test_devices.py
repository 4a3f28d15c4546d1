"""Descriptions of devices: built in, saved, loaded, and refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from splash_trt.config import EngineConfig
from splash_trt.scheduler import devices
from splash_trt.scheduler.devices import (
    BUILT_IN,
    calibration_file,
    device_for,
    load_device,
    parse_device,
    refuse_undescribed,
    save_device,
    this_cpu,
)


def test_built_in_ones_say_where_their_figures_are_from() -> None:
    assert set(BUILT_IN) == {"h200", "h100", "b200", "cpu"}
    for name, device in BUILT_IN.items():
        assert device.name == name and len(device.origin) > 100
        assert load_device(name.upper()) is device
        assert parse_device(json.loads(json.dumps(asdict(device))), "x") == device
    assert BUILT_IN["h200"].memory_bytes_s == pytest.approx(4.3e12)
    assert BUILT_IN["h200"].flops["bfloat16"] == pytest.approx(785e12)
    assert BUILT_IN["h200"].link_bytes_s == pytest.approx(369e9)
    assert BUILT_IN["b200"].memory_bytes_s == pytest.approx(8e12 * 4.3 / 4.8)


@pytest.mark.parametrize(("link", "least"), [(1.0, 1), (1e30, 1 << 40)])
def test_any_link_gives_bytes_a_step_that_a_deployment_takes(link: float, least: int) -> None:
    device = replace(BUILT_IN["cpu"], link_bytes_s=link)
    assert device.migration_bytes == least == EngineConfig(migration_bytes=device.migration_bytes).migration_bytes


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "device-2.json"
    device = replace(BUILT_IN["cpu"], name="mine", concurrent_ranks=2, provenance={"ranks": 2, "commit": "abc"})
    save_device(device, path)
    save_device(device, path)
    assert load_device(path) == device
    assert [p.name for p in tmp_path.iterdir()] == ["device-2.json"]


def without(name: str) -> dict[str, Any]:
    value = asdict(BUILT_IN["cpu"])
    del value[name]
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "holds no object"),
        (asdict(BUILT_IN["cpu"]) | {"speed": 1}, "unknown field 'speed'; remove it"),
        (without("link_bytes_s"), "field 'link_bytes_s' is missing; add it"),
        (asdict(BUILT_IN["cpu"]) | {"link_bytes_s": 0}, "link_bytes_s: 0 is no number from 1 to"),
        (asdict(BUILT_IN["cpu"]) | {"step_s": "1"}, "step_s: '1' is no number"),
        (asdict(BUILT_IN["cpu"]) | {"step_s": float("nan")}, "step_s: nan is no number"),
        (asdict(BUILT_IN["cpu"]) | {"operation_s": True}, "operation_s: True is no number"),
        (asdict(BUILT_IN["cpu"]) | {"memory_bytes": 1.5}, "memory_bytes: 1.5 is no whole number"),
        (asdict(BUILT_IN["cpu"]) | {"collective_hop_s": -1}, "collective_hop_s: -1 is no number from 0 to 1000;"),
        (asdict(BUILT_IN["cpu"]) | {"concurrent_ranks": 0}, "concurrent_ranks: 0 is neither null nor"),
        (asdict(BUILT_IN["cpu"]) | {"padded": 1}, "padded: 1 is neither true nor false"),
        (asdict(BUILT_IN["cpu"]) | {"flops": {}}, "flops: is empty"),
        (asdict(BUILT_IN["cpu"]) | {"flops": {"int4": 1e9}}, "flops: 'int4' is not one of"),
        (asdict(BUILT_IN["cpu"]) | {"flops": {"float32": -1}}, "flops.float32: -1 is no number from 1 to"),
        (asdict(BUILT_IN["cpu"]) | {"factors": {"magic": 1}}, "factors: 'magic' is not one of"),
        (asdict(BUILT_IN["cpu"]) | {"memory_bytes": 10**31}, "memory_bytes: 1.* is no number .* to 1e.30"),
        (asdict(BUILT_IN["cpu"]) | {"memory_bytes_s": 1e31}, "memory_bytes_s: 1e.31 is no number"),
        (asdict(BUILT_IN["cpu"]) | {"memory_bytes_s": 1e-300}, "memory_bytes_s: 1e-300 is no number from 1"),
        (asdict(BUILT_IN["cpu"]) | {"flops": {"float32": 1e-300}}, "flops.float32: 1e-300 is no number from 1"),
        (asdict(BUILT_IN["cpu"]) | {"step_s": 0}, "step_s: 0 is no number above 0"),
        (asdict(BUILT_IN["cpu"]) | {"link_bytes_s": 10**400}, "link_bytes_s: 1.* is no number"),
        (asdict(BUILT_IN["cpu"]) | {"step_s": 1001}, "step_s: 1001 is no number above 0 and at most 1000;"),
        (asdict(BUILT_IN["cpu"]) | {"flops": {"float32": 1e31}}, "flops.float32: 1e.31 is no number"),
        (asdict(BUILT_IN["cpu"]) | {"factors": {"copies": 1e7}}, "factors.copies: 10000000.0 is no number"),
        (asdict(BUILT_IN["cpu"]) | {"concurrent_ranks": 10**400}, "concurrent_ranks: 1"),
        (asdict(BUILT_IN["cpu"]) | {"factors": [1]}, "factors: .* is no object"),
        (asdict(BUILT_IN["cpu"]) | {"origin": ""}, "origin: '' is no text"),
        (asdict(BUILT_IN["cpu"]) | {"provenance": {"a": [1]}}, "provenance: is no object of texts and numbers"),
    ],
)
def test_wrong_descriptions_are_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"device: file: .*{message}|device: file {message}"):
        parse_device(value, "file")


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'h300' is neither one of b200, cpu, h100, h200 nor a file"):
        load_device("h300")
    path = tmp_path / "device.json"
    for data in (b"{", b"\xff\xfe", b"[" * 100000, b"9" * 5000):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="is no JSON.*calibrate again"):
            load_device(path)


def test_this_cpu_is_as_it_is_told() -> None:
    device = this_cpu(cores=3, memory_bytes_s=7e9, float32_flops=4e10)
    assert device == this_cpu(cores=3, memory_bytes_s=7e9, float32_flops=4e10)
    assert device.concurrent_ranks == 3 and device.flops["float32"] == 4e10 and device.padded
    measured = this_cpu()
    assert measured.flops["float32"] > 1e8 and measured.memory_bytes_s > 1e8


def test_an_engines_ranks_run_on_what_was_calibrated_for_so_many(tmp_path: Path) -> None:
    save_device(replace(BUILT_IN["cpu"], name="mine"), calibration_file(tmp_path, 2))
    assert device_for(tmp_path, 2, None).name == "mine"
    assert device_for(tmp_path, 4, None).name == "this CPU"
    calibration_file(tmp_path, 4).write_text("{}")
    with pytest.raises(ValueError, match="field 'name' is missing"):
        device_for(tmp_path, 4, None)


@pytest.mark.parametrize(
    ("name", "device"), [("NVIDIA H200", "h200"), ("NVIDIA B200", "b200"), ("NVIDIA H100 80GB HBM3", "h100")]
)
def test_a_gpu_is_known_by_its_name(tmp_path: Path, name: str, device: str) -> None:
    assert device_for(tmp_path, 8, name) is BUILT_IN[device]
    save_device(replace(BUILT_IN["h200"], name="mine"), calibration_file(tmp_path, 8))
    assert device_for(tmp_path, 8, name).name == "mine"


@pytest.mark.parametrize("name", ["Tesla T4", "NVIDIA GH200X", ""])
def test_a_gpu_that_nobody_described(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"^device: there is no description of this machine's {name}; name one of h"):
        device_for(tmp_path, 8, name)


@pytest.mark.parametrize(
    ("listed", "refused"),
    [
        ([], ""),
        (["IRQ: 1\n"], ""),
        (["Model: \t\t NVIDIA H200\nIRQ: 1\n"], ""),
        (["Model: T4\n"], "T4"),
        (["Model: T4\n", "Model: L4\n"], "T4"),
        (["Model: T4\n", "Model: NVIDIA B200\n"], ""),
    ],
)
def test_before_there_are_ranks_only_what_the_system_lists_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: list[str], refused: str
) -> None:
    for i, text in enumerate(listed):
        (tmp_path / f"0000:0{i}").mkdir()
        (tmp_path / f"0000:0{i}" / "information").write_text(text)
    monkeypatch.setattr(devices, "_GPUS", tmp_path)
    if refused:
        with pytest.raises(ValueError, match=f"no description of this machine's {refused}"):
            refuse_undescribed(tmp_path, 8)
        save_device(BUILT_IN["h200"], calibration_file(tmp_path, 8))
    refuse_undescribed(tmp_path, 8)
    calibration_file(tmp_path, 8).write_text("{}")
    with pytest.raises(ValueError, match="field 'name' is missing"):
        refuse_undescribed(tmp_path, 8)
