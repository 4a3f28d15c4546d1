"""Triton Inference Server in front of a running frontend: a model repository, and the program that it runs."""
