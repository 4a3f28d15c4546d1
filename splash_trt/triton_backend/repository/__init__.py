"""What Triton's Python backend runs. These files are copied into a model repository, where splash_trt is not installed.

They import the standard library, numpy, pyzmq, msgspec and each other (relatively: Triton imports them as a package).
"""
