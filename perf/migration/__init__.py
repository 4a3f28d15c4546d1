"""Benchmarks of what a switch between layouts costs while requests are served."""
