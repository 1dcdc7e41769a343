"""What decides a preparation's result: the presets, and the hash by which a second call recognises the first."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Literal

RECIPE = 2
"""Goes up whenever code changes what the same settings produce."""


@dataclass(frozen=True)
class ProblemSettings:
    """The distribution that problems are drawn from."""

    operation_weights: dict[int, float] = field(default_factory=lambda: {2: 0.5, 3: 0.5})
    """Number of operations to its relative frequency."""
    largest_start: int = 50
    largest_operand: int = 9


@dataclass(frozen=True)
class ModelSettings:
    """The shape of the model, in the words of the Qwen3 config."""

    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    mlp_size: int = 256
    initializer_range: float = 0.08
    vocab_size: int = 512


@dataclass(frozen=True)
class WarmStartSettings:
    """The two supervised phases: learn to work a problem out, then to answer mostly without doing so."""

    learning_rate: float = 3e-3
    batch_size: int = 16
    first_problems: ProblemSettings | None = ProblemSettings({1: 1.0}, largest_start=9)
    """Shorter and smaller problems that phase 1 begins with; None begins with those of the preset."""
    first_pass_rate: float = 0.5
    """They are left when a worked solution of theirs is sampled right this often."""
    worked_share: float = 0.95
    """Part of phase 1's demonstrations that show their working; the rest are bare guesses."""
    guess_error: int = 9
    """A guess is off by at most this much, uniformly."""
    stop_pass_rate: float = 0.5
    """Phase 1 settles down when a worked solution is sampled right this often."""
    max_steps: int = 2000
    settle_steps: int = 150
    """Steps after that, in which the learning rate falls linearly to phase 2's."""
    weak_learning_rate: float = 5e-4
    weak_worked_share: float = 0.3
    """Phase 2's share of worked demonstrations; turned up while too few answers are right."""
    pinned: Literal["greedy", "sampled"] = "greedy"
    """Which pass rate decides that phase 2 ends: of greedy answers, or of those sampled at temperature 1."""
    pinned_window: tuple[float, float] = (0.18, 0.28)
    """Where that rate has to be."""
    max_weak_steps: int = 400


@dataclass(frozen=True)
class Settings:
    """Everything that the written files depend on."""

    preset: str
    seed: int
    problems: ProblemSettings = ProblemSettings()
    model: ModelSettings = ModelSettings()
    warm_start: WarmStartSettings = WarmStartSettings()
    num_train: int = 20_000
    num_heldout: int = 512
    max_new_tokens: int = 40
    """What one completion may take when the start is measured."""

    def fingerprint(self) -> str:
        """Hash the settings and the recipe's number: equal fingerprints mean equal files."""
        text = json.dumps({"recipe": RECIPE, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


PRESETS = ("standard", "hard", "wide-heads")


def settings_of(preset: str, seed: int) -> Settings:
    """Look up a preset.

    Raises:
        ValueError: there is no such preset.
    """
    if preset == "standard":
        return Settings(preset, seed)
    if preset == "wide-heads":
        # As wide as vLLM's kernels for CPUs need them.
        return Settings(preset, seed, model=ModelSettings(num_heads=2, num_kv_heads=1))
    if preset == "hard":
        return Settings(
            preset,
            seed,
            problems=ProblemSettings({3: 0.5, 4: 0.25, 5: 0.12, 6: 0.07, 8: 0.04, 12: 0.02}),
            warm_start=WarmStartSettings(
                first_problems=None,
                settle_steps=20,
                pinned="sampled",
                pinned_window=(0.06, 0.1),
            ),
            max_new_tokens=128,
        )
    raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
