"""What is computed on trajectories, as pure functions on tensors.

Layout: tokens are packed, [T] for all sequences of a batch one after another, with ``sequence_index`` [T] naming each
token's sequence. A sequence's tokens are contiguous and in order; tokens that the policy did not sample (prompts,
observations, padding) have ``response_mask`` False and never count. So nothing depends on padding or packing.
"""
