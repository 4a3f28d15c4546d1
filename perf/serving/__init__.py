"""What clients of `splash-trt serve` see: tokens per second, first tokens, time per token, and a rollout's makespan."""
