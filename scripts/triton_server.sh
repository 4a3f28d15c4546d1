#!/usr/bin/env bash
# Installs Triton Inference Server 2.51 from its wheel on PyPI (55 MB, no GPU and no container needed) and starts it.
#
#     bash scripts/triton_server.sh REPOSITORY [arguments of tritonserver]
#     bash scripts/triton_server.sh --install-only
#
# It listens on 127.0.0.1, ports 8000 (HTTP), 8001 (gRPC) and 8002 (metrics), unless arguments say otherwise. Everything
# goes to .venv-triton beside this folder, or to $SPLASH_TRITON. Needs a Python from 3.10 to 3.13 with its shared
# library, which is that of .venv or $PYTHON.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
home="${SPLASH_TRITON:-$root/.venv-triton}"
server="$home/server/pytriton/tritonserver"
# What the model imports. The backend of this release dies at its first request with numpy 2.
packages=("numpy<2" "pyzmq>=26" "msgspec>=0.19")
wheel="nvidia-pytriton==0.7.0"

fail() {
    echo "scripts/triton_server.sh: $*" >&2
    exit 1
}

install() {
    local python="${PYTHON:-$root/.venv/bin/python}" version
    [ -x "$python" ] || python="$(command -v python3)" || fail "found no Python; name one with PYTHON=/path/to/python"
    version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    echo "installing Triton Inference Server for Python $version into $home" >&2
    rm -rf "$home"
    # From the interpreter below a virtual environment, whose packages have no place in this one.
    "$("$python" -c 'import os, sys; print(os.path.realpath(sys.executable))')" -m venv "$home/venv"
    "$home/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
    # Without its dependencies, which are for its other purpose, and in a folder of its own: it is a server.
    "$home/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
        --target "$home/server" "$wheel"
    [ -f "$server/python_backend_stubs/$version/triton_python_backend_stub" ] ||
        fail "$wheel has no program for Python $version; name another one with PYTHON=/path/to/python"
    cp "$server/python_backend_stubs/$version/triton_python_backend_stub" "$server/backends/python/"
    stamp >"$home/installed"
}

stamp() {
    sha256sum "${BASH_SOURCE[0]}" | cut -d' ' -f1
}

# Prints the folder of libpython, which the backend's program is linked with.
library_folder() {
    "$home/venv/bin/python" - <<'PYTHON'
import pathlib, sys, sysconfig
name = "libpython%d.%d.so.1.0" % sys.version_info[:2]
multiarch = sysconfig.get_config_var("MULTIARCH") or ""
for folder in (sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib", f"/usr/lib/{multiarch}", "/usr/lib64"):
    if folder and (pathlib.Path(folder) / name).exists():
        print(folder)
        break
else:
    sys.exit(1)
PYTHON
}

# Debian and Ubuntu leave it out of their Python.
install_library() {
    local package
    package="$("$home/venv/bin/python" -c 'import sys; print("libpython%d.%d" % sys.version_info[:2])')"
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        fail "found no $package.so.1.0. On Debian or Ubuntu: sudo apt-get install -y $package"
    fi
    echo "installing $package with apt-get" >&2
    apt-get update -qq && apt-get install -y -qq --no-install-recommends "$package" >/dev/null
}

[ $# -gt 0 ] || fail "usage: bash scripts/triton_server.sh REPOSITORY [arguments of tritonserver]"
if [ "$(cat "$home/installed" 2>/dev/null)" != "$(stamp)" ]; then
    install
fi
library_folder >/dev/null || install_library
libraries="$(library_folder)" || fail "found no shared library of $("$home/venv/bin/python" --version)"
[ "$1" != "--install-only" ] || exit 0
repository="$1"
shift
[ -d "$repository" ] || fail "$repository is no folder; write one with: splash-trt triton-repo --out $repository ..."
# The backend starts its program with the first python3 on the path; PYTHONPATH does not reach it.
export PATH="$home/venv/bin:$PATH"
export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$server/bin/tritonserver" --model-repository="$repository" --backend-directory="$server/backends" \
    --http-address=127.0.0.1 --grpc-address=127.0.0.1 --metrics-address=127.0.0.1 \
    --allow-gpu-metrics=false --pinned-memory-pool-byte-size=0 "$@"
