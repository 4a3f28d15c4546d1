"""Differences between TensorRT's packages are found by their names: stand-ins that have what each is known to have."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from splash_engines import trt_api
from splash_engines.trt_api import Api, BuildFailure, Features, load_api, probe
from tests.tensorrt.evaluated import api

ROOT = Path(__file__).parents[2]


class _Logger:
    ERROR, INTERNAL_ERROR = "error", "internal"

    def __init__(self) -> None:
        pass


def package(name: str, version: str, *, flags: tuple[str, ...], network: tuple[str, ...], **more: Any) -> Any:
    """What probe and Api look at of a package."""
    return SimpleNamespace(
        __name__=name,
        __version__=version,
        ILogger=_Logger,
        NetworkDefinitionCreationFlag=SimpleNamespace(**{flag: index for index, flag in enumerate(flags)}),
        INetworkDefinition=SimpleNamespace(**dict.fromkeys(network)),
        IBuilderConfig=SimpleNamespace(),
        **more,
    )


FULL_10 = package(
    "tensorrt", "10.14.1", flags=("EXPLICIT_BATCH", "STRONGLY_TYPED"), network=("add_plugin_v2", "add_plugin_v3")
)
FULL_11 = package(
    "tensorrt", "11.1.0", flags=("STRONGLY_TYPED",), network=("add_plugin_v3", "add_dist_collective")
)


def test_features() -> None:
    assert probe(FULL_10) == Features(
        explicit_batch_flag=True, capability_lists=False, dist_collective=False, plugins=True
    )
    assert probe(FULL_11) == Features(
        explicit_batch_flag=False, capability_lists=False, dist_collective=True, plugins=True
    )
    assert api().features == Features(
        explicit_batch_flag=False, capability_lists=True, dist_collective=True, plugins=False
    )


@pytest.mark.parametrize(("trt", "bits"), [(FULL_10, 0b11), (FULL_11, 0b1)])
def test_network_flags(trt: Any, bits: int) -> None:
    builder = SimpleNamespace(create_network=lambda given: given)
    assert Api(trt).create_network(builder) == bits


def test_targets() -> None:
    assert {"sm_89", "sm_120"} <= set(api().targets())
    assert Api(FULL_11).targets() == ()
    with pytest.raises(ValueError, match="sm_90 is none that tensorrt_rtx .* builds for"):
        api().check_targets(["sm_89", "sm_90"], "sm_90")
    with pytest.raises(ValueError, match="names no GPU"):
        api().check_targets([], None)
    Api(FULL_11).check_targets(["sm_90"], "sm_90")
    with pytest.raises(ValueError, match="the GPU of this machine only, which is sm_90"):
        Api(FULL_11).check_targets(["sm_89"], "sm_90")


@pytest.mark.parametrize(
    ("installed", "gpu", "targets", "chosen"),
    [
        ("both", "sm_90", ["sm_90"], "tensorrt"),
        ("both", "sm_89", ["sm_89", "sm_120"], "tensorrt_rtx"),
        ("both", None, ["sm_120"], "tensorrt_rtx"),
        ("full", "sm_100", ["sm_100"], "tensorrt"),
    ],
)
def test_which_package(
    monkeypatch: pytest.MonkeyPatch, installed: str, gpu: str | None, targets: list[str], chosen: str
) -> None:
    packages = {"tensorrt": FULL_11, "tensorrt_rtx": api().trt if installed == "both" else None}
    monkeypatch.setattr(trt_api, "_import", packages.__getitem__)
    assert load_api(gpu, targets).name == chosen


def test_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt_api, "_import", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'splash-trt\[rtx\]'"):
        load_api("sm_90", ["sm_90"])


def test_collectives_need_their_layer() -> None:
    with pytest.raises(ValueError, match="tensorrt 10.14.1 has no DistCollective layers"):
        Api(FULL_10).add_all_reduce(None, None, 2)


def test_the_name_in_a_message() -> None:
    known = Api(FULL_11)
    known.log.errors.append(
        "IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error (attention_in/q_a/matmul: types differ. In "
        "validateTypes at /_src/optimizer/common/nodes/matMul.cpp:40)"
    )
    failure = known.failure("attention_in")
    assert isinstance(failure, BuildFailure)
    assert (failure.network, failure.node) == ("attention_in", "attention_in/q_a/matmul")
    assert str(failure).startswith("attention_in: node attention_in/q_a/matmul: IBuilder")
    known.log.errors[:] = []
    assert known.failure("head").node is None


def test_no_other_file_knows_the_packages() -> None:
    """Their differences stay in one place."""
    asks = re.compile(r"^\s*(?:import|from) tensorrt(?:_rtx)?\b|EXPLICIT_BATCH|set_compute_capability", re.MULTILINE)
    found = [path for path in (ROOT / "engines").rglob("*.py") if asks.search(path.read_text())]
    assert found == [ROOT / "engines" / "trt_api.py"]
