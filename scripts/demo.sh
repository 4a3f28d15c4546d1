#!/usr/bin/env bash
# Splash-TRT in two minutes, once it is installed: installs what is missing into .venv (a few minutes the first time),
# builds the engine of the small model in models/splash-tiny, serves it on four CPU ranks, lets the layout change while
# requests run, and checks every answer.
#
#     bash scripts/demo.sh
#
# Needs Python 3.10 to 3.13 and, for the first run, a network to PyPI. What it makes is in build/demo.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if (($#)); then
    echo "usage: bash scripts/demo.sh    (it takes no arguments; the comment at its top says what it does)" >&2
    exit 2
fi

source scripts/env.sh

# The ranks share the cores with each other; more threads in each would only make them wait.
export OMP_NUM_THREADS=1
# Tensors of the same sizes come and go in every step. Left to itself, glibc gives their memory back to the system and
# asks for it again each time, which costs a quarter of the CPU time.
export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824
exec python -m scripts.demo
