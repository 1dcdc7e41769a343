"""An answer that must be mathematically equal to the label. Sympy may never return, so children ask it."""

import sys
from collections.abc import Sequence
from pathlib import Path

from flotilla.services.reward.verifiers.comparing import ComparingVerifier
from flotilla.shared.config.sections.reward import MathConfig

WORKER = Path(__file__).with_name("math_worker.py")


class MathVerifier(ComparingVerifier):
    """Compares by math-verify.

    Args:
        config: the component's section.
        command: how to start the child; another one only in tests.
    """

    def __init__(self, config: MathConfig, command: Sequence[str] = (sys.executable, "-I", str(WORKER))) -> None:
        super().__init__(config, command)
