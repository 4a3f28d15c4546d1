"""What an operator sees of a deployment: metrics, also under other systems' names for them, traces, spans and logs."""
