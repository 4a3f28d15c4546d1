"""Rows read from the memory of other ranks' GPUs. Plain truth: splash_trt/runtime/peers.py's CollectivePeers."""
