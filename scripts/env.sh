# Makes .venv and installs the project and everything that its tests and the demo need. Source it, or run it:
#
#     source scripts/env.sh          # then python, mpirun and splash_trt are those of .venv
#     PYTHON=python3.12 bash scripts/env.sh
#
# A second run installs nothing until setup.py or this file changes. It needs a network to PyPI, and on a Debian or
# Ubuntu that lacks Python or its venv module also to that distribution's packages.
#
# Torch on a machine without a GPU: PyPI's x86-64 wheel for Linux is the CUDA build. It runs on a CPU, but it does not
# load without NVIDIA's libraries, so that several GB come along. To get the CPU build instead (200 MB), let pip see
# PyTorch's own index too:
#
#     PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu bash scripts/env.sh

SPLASH_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SPLASH_VENV="$SPLASH_ROOT/.venv"
# The release that the tests' tolerances were measured with. Users may have any that setup.py allows.
SPLASH_TORCH="torch==2.13.0"

splash_fail() {
    echo "scripts/env.sh: $*" >&2
    return 1
}

splash_apt_install() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        splash_fail "missing: $*. On Debian or Ubuntu: sudo apt-get install -y $*"
        return 1
    fi
    echo "installing with apt-get: $*"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

splash_python_fits() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

splash_python_version() {
    "$1" -c 'import platform; print(platform.python_version())'
}

# Prints the interpreter to make .venv with. $PYTHON wins; else the version that the tests run on most, then the others.
splash_find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        splash_python_fits "$PYTHON" || splash_fail "PYTHON=$PYTHON is not a Python from 3.10 to 3.13" || return 1
        command -v "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3.10 python3; do
        if splash_python_fits "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    splash_fail "found no Python from 3.10 to 3.13; install one, or name it with PYTHON=/path/to/python"
}

splash_make_venv() {
    local python version
    if [ -z "${PYTHON:-}" ] && ! splash_find_python >/dev/null 2>&1; then
        splash_apt_install python3 python3-venv || return 1
    fi
    python="$(splash_find_python)" || return 1
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        # Debian and Ubuntu leave these two out of their Python.
        version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
        splash_apt_install "python$version-venv" || return 1
    fi
    echo "making .venv with $python ($(splash_python_version "$python"))"
    "$python" -m venv --clear "$SPLASH_VENV"
}

splash_stamp() {
    # The folder is part of it: an editable installation points to where it was made.
    { cat "$SPLASH_ROOT/setup.py" "$SPLASH_ROOT/scripts/env.sh" && echo "$SPLASH_ROOT $1 $2"; } | sha256sum | cut -d' ' -f1
}

splash_install() {
    local extras version stamp
    if ! "$SPLASH_VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        splash_make_venv || return 1
    fi
    version="$(splash_python_version "$SPLASH_VENV/bin/python")" || return 1
    if [ -n "${PYTHON:-}" ] && [ "$(splash_python_version "$PYTHON")" != "$version" ]; then
        splash_fail "$SPLASH_VENV has Python $version, not that of PYTHON=$PYTHON; remove it first"
        return 1
    fi
    # The wheel's Open MPI is used even where the machine has one, so that the tests run on the same one everywhere.
    extras="mpi,test"
    if nvidia-smi -L >/dev/null 2>&1; then
        extras="$extras,gpu"
    fi
    stamp="$(splash_stamp "$version" "$extras")" || return 1
    if [ "$(cat "$SPLASH_VENV/installed" 2>/dev/null)" = "$stamp" ]; then
        return 0
    fi
    # Torch goes first and by exact version: left to the dependencies' ranges, pip may take a newer CUDA build over a
    # CPU build that is at hand.
    echo "installing $SPLASH_TORCH"
    "$SPLASH_VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$SPLASH_TORCH" || return 1
    echo "installing splash-trt[$extras]"
    "$SPLASH_VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
        --editable "$SPLASH_ROOT[$extras]" || return 1
    echo "$stamp" >"$SPLASH_VENV/installed"
}

# `return` where this file is sourced, so that a failure does not end the shell of whoever typed it.
splash_install || return 1 2>/dev/null || exit 1
export PATH="$SPLASH_VENV/bin:$PATH"
