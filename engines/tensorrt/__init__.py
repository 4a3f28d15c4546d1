"""The model's dense segments as TensorRT networks: their lowering, the plans built from it, and the engine over them.

Reading order: graph (how nodes are made and named), operations (the coarse operations as primitives), attention and
segments (what is in each network), sizes (which networks a rank needs), plans (built once for all who use them), cache
and store (kept, put into an engine), engine (what calls networks), plan_runtime (what executes plans), plan_executors
(from an engine's folder to that), active_set (the swap of engines).
"""
