"""What runs the dense parts of a step: the model's segments over coarse operations, and their lowerings."""
