"""Teachers behind URLs: inference servers that say how likely they find the tokens that the policy sampled."""
