#!/usr/bin/env bash
# Installs guidellm, a load client for OpenAI's API, and prints the path of its program.
#
#     "$(bash scripts/guidellm.sh)" benchmark run --help
#
# Everything goes to .venv-guidellm beside this folder, or to $SPLASH_GUIDELLM: its requirements are no others' business.
# Made with the Python of .venv, or with $PYTHON.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
home="${SPLASH_GUIDELLM:-$root/.venv-guidellm}"
# It needs torch for its data loader; pinned, so that pip does not look for an older one that suits the rest.
packages=("guidellm==0.8.1" "torch==2.13.0")

fail() {
    echo "scripts/guidellm.sh: $*" >&2
    exit 1
}

install() {
    local python="${PYTHON:-$root/.venv/bin/python}"
    [ -x "$python" ] || python="$(command -v python3)" || fail "found no Python; name one with PYTHON=/path/to/python"
    echo "installing ${packages[*]} into $home" >&2
    rm -rf "$home"
    # From the interpreter below a virtual environment, whose packages have no place in this one.
    "$("$python" -c 'import os, sys; print(os.path.realpath(sys.executable))')" -m venv "$home"
    "$home/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}" >&2
    stamp >"$home/installed"
}

stamp() {
    sha256sum "${BASH_SOURCE[0]}" | cut -d' ' -f1
}

[ $# -eq 0 ] || fail "takes no arguments; give them to the program whose path it prints"
if [ "$(cat "$home/installed" 2>/dev/null)" != "$(stamp)" ]; then
    install
fi
echo "$home/bin/guidellm"
