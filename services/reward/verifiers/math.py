"""An answer that must be mathematically equal to the label. Sympy may never return, so children ask it."""

from collections.abc import Sequence

from flotilla.services.reward.verifiers.comparing import ComparingVerifier
from flotilla.shared.children.processes import python_module
from flotilla.shared.config.sections.reward import MathConfig

WORKER = python_module("flotilla.services.reward.verifiers.math_worker")


class MathVerifier(ComparingVerifier):
    """Compares by math-verify.

    Args:
        config: the component's section.
        command: how to start the child; another one only in tests.
    """

    def __init__(self, config: MathConfig, command: Sequence[str] = WORKER) -> None:
        super().__init__(config, command)
