"""Benchmarks of single steps, by layout, number of ranks, batch and context."""
