"""What is added to some weights when they are written into an image: a product of adapters, say."""

from collections.abc import Callable

from torch import Tensor

from flotilla.services.trainer.weights.parts import Index

Increment = Callable[[str, Index], Tensor | None]
"""From a parameter's path, and which of its elements are asked for, to what is added to these; None for nothing."""
