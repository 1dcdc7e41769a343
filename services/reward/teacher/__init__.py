"""Teachers behind URLs: inference servers that return log-probabilities of the tokens that the policy sampled."""
