"""What an operator sees of a deployment: metrics under the names that others use, traces, spans and logs."""
