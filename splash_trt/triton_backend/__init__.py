"""Serving through Triton Inference Server: a model repository whose program passes requests on to a frontend."""
