"""Text environments that the fleet has: each a class with ``reset(seed)`` and ``step(text)``."""
