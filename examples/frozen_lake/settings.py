"""What decides a preparation's result, and the hash by which a second call recognises the first."""

import hashlib
import json
from dataclasses import asdict, dataclass, field

from examples.arithmetic.settings import ModelSettings

RECIPE = 1
"""Goes up whenever code changes what the same settings produce."""


@dataclass(frozen=True)
class WarmStartSettings:
    """Two supervised phases on walks: mostly good ones, then mostly random ones."""

    batch_size: int = 24
    learning_rate: float = 6e-3
    good_share: float = 0.8
    """Phase 1: steps of a walk that go towards the goal and are learned; the others go anywhere."""
    good_steps: int = 500
    stop_success: float = 0.6
    """Phase 1 ends early when so many walks reach the goal."""
    weak_learning_rate: float = 5e-4
    weak_share: float = 0.0
    max_weak_steps: int = 300
    success_window: tuple[float, float] = (0.18, 0.28)
    """Where the share of walks that reach the goal has to be at the end."""


@dataclass(frozen=True)
class Settings:
    """Everything that the written files depend on."""

    preset: str
    seed: int
    size: int = 4
    max_turns: int = 8
    model: ModelSettings = field(default_factory=lambda: ModelSettings(hidden_size=64, num_layers=2, mlp_size=256))
    warm_start: WarmStartSettings = WarmStartSettings()
    num_train: int = 20_000
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
