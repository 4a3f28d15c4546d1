#!/usr/bin/env bash
# Installs what is missing, then runs every check and every test that is not slow and needs neither a GPU nor TensorRT;
# stops at the first that fails.
# Extra arguments go to pytest: `bash scripts/test.sh -m nightly` runs the slow proofs instead, and
# `bash scripts/test.sh tests/unit -k placement` a part.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Runs a command and says how long it took: timed NAME COMMAND...
timed() {
    local name="$1" start="$SECONDS"
    shift
    echo "== $name"
    "$@"
    echo "== $name: $((SECONDS - start)) s"
}

timed "install" source scripts/env.sh
timed "ruff" ruff check .
timed "mypy" bash scripts/check_types.sh
timed "imports" python scripts/check_imports.py

# Ranks share the cores with each other: a thread pool in each of them would only make them wait. Open MPI refuses to
# run as root, which is who runs in a container, unless it is told twice.
export OMP_NUM_THREADS=1
# As ranks have it (splash_trt/environment.py): tensors of the same sizes come and go all the time.
export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824
export OMPI_ALLOW_RUN_AS_ROOT=1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
echo "== pytest"
exec python -m pytest "$@"
