#!/usr/bin/env bash
# Runs mypy over the three packages under the names that they are imported by. mypy follows no editable installation
# that renames folders, so it gets links with the right names. Run it with .venv active; extra arguments go to mypy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mkdir -p build/typecheck
ln -sfn ../../engines build/typecheck/splash_engines
ln -sfn ../../plugins build/typecheck/splash_plugins

mypy "$@" scripts/check_imports.py
# Report the files by their own paths, not the links'.
mypy "$@" -p splash_trt -p splash_engines -p splash_plugins | sed 's,^build/typecheck/splash_,,'
