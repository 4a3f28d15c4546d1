"""Benchmarks. Run from the repository's root: `python -m perf.<area>.<name>`; see perf/README.md."""
