"""`splash-trt calibrate`: measures an engine's steps on its ranks, and fits the description of the device to them."""
