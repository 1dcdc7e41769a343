"""Which tracker a section of the spec means, and whether the packages that it needs are there."""

import importlib.util

from flotilla.services.gateway.tracking.base import TrackedRun, Tracker
from flotilla.services.gateway.tracking.jsonl import JsonlTracker
from flotilla.services.gateway.tracking.mlflow import MlflowTracker
from flotilla.services.gateway.tracking.swanlab import SwanlabTracker
from flotilla.services.gateway.tracking.tensorboard import TensorboardTracker
from flotilla.services.gateway.tracking.trackio import TrackioTracker
from flotilla.services.gateway.tracking.wandb import WandbTracker
from flotilla.shared.config.sections.tracking import (
    JsonlTrackerConfig,
    MlflowTrackerConfig,
    SwanlabTrackerConfig,
    TensorboardTrackerConfig,
    TrackerConfig,
    TrackioTrackerConfig,
)
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec, Scalar

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio", "swanlab": "swanlab"}
"""What is imported, by kind; our extra has the kind's name."""


def open_tracker(config: TrackerConfig, run: TrackedRun) -> Tracker:
    """Open a tracker where its earlier one of the same run left off; may take long, and raise what its library does."""
    if isinstance(config, JsonlTrackerConfig):
        return JsonlTracker(config, run)
    if isinstance(config, TensorboardTrackerConfig):
        return TensorboardTracker(config, run)
    if isinstance(config, MlflowTrackerConfig):
        return MlflowTracker(config, run)
    if isinstance(config, TrackioTrackerConfig):
        return TrackioTracker(config, run)
    if isinstance(config, SwanlabTrackerConfig):
        return SwanlabTracker(config, run)
    return WandbTracker(config, run)


def check_trackers(spec: ExperimentSpec) -> None:
    """Check that what the trackers need is installed.

    Raises:
        InvalidSpec: one entry per tracker that lacks its package.
    """
    entries: list[dict[str, Scalar]] = [
        {
            "path": f"tracking.trackers.{number}.kind",
            "value": tracker.kind,
            "allowed": f"a kind whose package is installed where the gateway runs: pip install "
            f"'flotilla[{tracker.kind}]', or use jsonl or tensorboard, which need nothing",
        }
        for number, tracker in enumerate(spec.tracking.trackers)
        if tracker.kind in PACKAGES and importlib.util.find_spec(PACKAGES[tracker.kind]) is None
    ]
    if entries:
        raise InvalidSpec("; ".join(f"{entry['path']}: {entry['allowed']}" for entry in entries), errors=entries)
