"""Parts of the demo model's training: text, tokenizer, network, baselines and report."""
