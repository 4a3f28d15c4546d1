"""`splash-trt triton-repo`: writes a model repository for Triton Inference Server."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import click

from splash_trt.frontend.client_socket import check_endpoint
from splash_trt.options import or_fail
from splash_trt.triton_backend import repository
from splash_trt.triton_backend.model_config import config_text

FILES = ("model.py", "connection.py", "inputs.py", "outputs.py", "protocol.py")
MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def write_repository(
    out: Path, endpoint: str, model_name: str, *, max_requests: int = 1024, batched: bool = False
) -> Path:
    """Writes the model's folder, out/model_name, and returns it. Files of an earlier one are replaced. Raises
    ValueError."""
    check_endpoint(endpoint, "endpoint")
    if not MODEL_NAME.fullmatch(model_name):
        allowed = "letters, digits, _, - and ., and not begin with the last two"
        raise ValueError(f"model_name: {model_name!r} is not allowed; it must be made of {allowed}")
    model = out / model_name
    version = model / "1"
    version.mkdir(parents=True, exist_ok=True)
    source = Path(repository.__file__).parent
    for file in FILES:
        shutil.copyfile(source / file, version / file)
    (model / "config.pbtxt").write_text(config_text(model_name, endpoint, max_requests, batched), encoding="utf-8")
    return model


@click.command("triton-repo")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Triton's --model-repository.")
@click.option("--endpoint", required=True, metavar="ADDRESS",
              help="What `splash-trt serve --client-endpoint` has: ipc:///path or tcp://127.0.0.1:PORT.")  # fmt: skip
@click.option("--model-name", default="splash", show_default=True, help="As Triton's clients name it.")
@click.option("--max-requests", type=click.IntRange(min=1), default=1024, show_default=True,
              help="Most requests under way at once; more are refused.")  # fmt: skip
@click.option("--batched", is_flag=True,
              help="Tensors have a leading axis of size 1, as clients of TensorRT-LLM's models send them.")  # fmt: skip
def triton_repo(out: Path, endpoint: str, model_name: str, max_requests: int, batched: bool) -> None:
    """Write a model repository with which Triton Inference Server serves what `splash-trt serve` does."""
    model = or_fail(lambda: write_repository(out, endpoint, model_name, max_requests=max_requests, batched=batched))
    click.echo(f"Wrote {model}")
