"""The model's dense segments as TensorRT networks: how they are made, the plans built from them, and what runs those.

Reading order: graph (how nodes are made and named), operations (the coarse operations as primitives), attention and
segments (what is in each network), sizes (which networks a rank needs), plans (builds each one once for all that use
it), cache and store (keep plans, and put them into an engine), engine (calls the networks of a step), plan_runtime
(executes plans), plan_executors (makes that from an engine's folder), active_set (the swap of engines).
"""
