"""Benchmarks of what clients of `splash-trt serve` see: tokens/s, times to the first and per token, makespan."""
