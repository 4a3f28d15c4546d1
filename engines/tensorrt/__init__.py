"""The model's dense segments as TensorRT networks: their lowering, the plans built from it, and the engine over them.

Reading order: graph (how nodes are made and named), operations (the coarse operations as primitives), segments (what
is in each network), sizes (which networks a rank needs), plans (built, cached, stored), engine (what calls them).
"""
