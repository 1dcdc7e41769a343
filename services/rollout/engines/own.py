"""Makes the embedded engine that a spec asks for: of its model, or of what a run recorded."""

from collections.abc import Callable
from pathlib import Path

from flotilla.services.rollout.engines.base import Engine
from flotilla.services.rollout.engines.process.engine import ProcessEngine
from flotilla.services.rollout.engines.recorded import RecordedEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.config.sections.engine import TorchEngineConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.models.hub import model_directory


def embedded_engine(
    spec: ExperimentSpec, engine: TorchEngineConfig, check: Callable[[str], None] | None = None
) -> Engine:
    """Make it, not yet started, from a spec in which nothing is left to ``auto``; ``check`` is for ``dump_at``."""
    if (recorded := engine.recorded) is not None:
        return RecordedEngine(
            Path(recorded.dump),
            token_seconds=recorded.token_seconds,
            slots=engine.slots,
            context_tokens=engine.context_tokens,
            check=check,
        )
    return ProcessEngine(embedded_settings(spec, engine))


def embedded_settings(spec: ExperimentSpec, engine: TorchEngineConfig) -> EngineSettings:
    """Read what the embedded engine needs from a spec in which nothing is left to ``auto``."""
    assert spec.model.dtype != "auto"
    return EngineSettings(
        model_path=str(model_directory(spec.model)),
        dtype=spec.model.dtype,
        device=engine.device,
        slots=engine.slots,
        context_tokens=engine.context_tokens,
        threads=engine.threads,
        overlap_load=spec.asynchrony.publication.overlap_load is not False,
        batch_invariant=engine.batch_invariant,
        is_exact=spec.exactness is not None,
        prefix_cache_mb=engine.prefix_cache_mb,
        image_pixels=None if (images := spec.data.images) is None else (images.min_pixels, images.max_pixels),
        records_experts=spec.algorithm.router_replay == "R3",
    )
