"""The record of samples: what the model wrote, how it was graded, and what training made of it."""
