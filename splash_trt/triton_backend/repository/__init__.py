"""The program that Triton's Python backend runs. Its files are copied into a model repository; splash_trt need not be
installed there.

They import the standard library, numpy, pyzmq, msgspec and each other (relatively: Triton imports them as a package).
"""
