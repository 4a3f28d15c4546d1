#!/usr/bin/env bash
# Unpacks the Python part of TensorRT's wheels (1 MB each, PyPI) for the tests of the plugins' registrations.
#
#     bash scripts/tensorrt_sources.sh FOLDER VERSION...
#
# FOLDER/VERSION/tensorrt_bindings holds that version's sources; one that is there already is left alone. The libraries
# are not fetched, and nothing of this can be imported without them or a stand-in.
set -euo pipefail
folder="$1"
shift
for version in "$@"; do
    [ -d "$folder/$version/tensorrt_bindings" ] && continue
    # Which CUDA the compiled part is for makes no difference here.
    case "$version" in
        10.*) name="tensorrt-cu12-bindings" ;;
        *) name="tensorrt-cu13-bindings" ;;
    esac
    mkdir -p "$folder"
    fresh="$(mktemp -d "$folder/.fresh-XXXXXX")"
    python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target "$fresh" "$name==$version"
    rm -f "$fresh"/tensorrt_bindings/tensorrt.so
    chmod 755 "$fresh"
    mv -T "$fresh" "$folder/$version" 2>/dev/null || rm -rf "$fresh"  # someone else was quicker
done
