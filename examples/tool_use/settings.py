"""What decides a preparation's result, and the hash by which a second call recognises the first."""

import hashlib
import json
from dataclasses import asdict, dataclass, field

from examples.arithmetic.settings import ModelSettings, ProblemSettings

RECIPE = 1
"""Goes up whenever code changes what the same settings produce."""


@dataclass(frozen=True)
class WarmStartSettings:
    """Two supervised phases: learn to use the calculator, then to guess without it."""

    batch_size: int = 16
    learning_rate: float = 3e-3
    call_share: float = 0.8
    """Phase 1: demonstrations that call the calculator; the others guess."""
    stop_skill: float = 0.65
    """Phase 1 ends when a demonstration with the calculator is this likely, given that it is called."""
    max_steps: int = 1500
    weak_learning_rate: float = 3e-4
    weak_call_share: float = 0.1
    max_weak_steps: int = 200
    call_window: tuple[float, float] = (0.15, 0.25)
    """Where the probability of a call has to be at the end."""
    guess_error: int = 40
    """A guess is off by at most this much, uniformly."""


@dataclass(frozen=True)
class Settings:
    """Everything that the written files depend on."""

    preset: str
    seed: int
    problems: ProblemSettings = field(
        default_factory=lambda: ProblemSettings({2: 1.0}, largest_start=99, largest_operand=99)
    )
    model: ModelSettings = field(default_factory=ModelSettings)
    warm_start: WarmStartSettings = WarmStartSettings()
    num_train: int = 10_000
    num_heldout: int = 256

    def fingerprint(self) -> str:
        """Hash the settings and the recipe's number: equal fingerprints mean equal files."""
        text = json.dumps({"recipe": RECIPE, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


PRESETS = ("standard",)


def settings_of(preset: str, seed: int) -> Settings:
    """Look up a preset.

    Raises:
        ValueError: there is no such preset.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    return Settings(preset, seed)
