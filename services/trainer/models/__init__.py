"""The policy as a Hugging Face causal LM: loading it, its log-probabilities, its optimiser."""
