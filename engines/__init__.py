"""Built engines (a model's weights in a folder), the tables of kernels that a step's program calls, and the model's
dense segments as TensorRT networks."""
