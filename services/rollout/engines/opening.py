"""Makes the engine that a spec asks for, and says which ones a service can use."""

from pathlib import Path

from services.rollout.engines.base import Engine
from services.rollout.engines.process.engine import ProcessEngine
from services.rollout.engines.settings import EngineSettings
from services.rollout.engines.sglang.engine import SglangEngine
from services.rollout.engines.sglang.settings import SglangSettings
from shared.config.engine import SglangEngineConfig, TorchEngineConfig
from shared.config.spec import ExperimentSpec
from shared.errors import InvalidSpec
from shared.model_hub import model_directory
from shared.schemas.engine import EngineCapability, EngineOffer
from shared.settings import LOOPBACK, IPNetwork


def make_engine(spec: ExperimentSpec, sglang_python: Path | None, networks: tuple[IPNetwork, ...] = LOOPBACK) -> Engine:
    """Make the engine, not yet started; a hub's model has been fetched before.

    Args:
        spec: of the experiment.
        sglang_python: interpreter that has SGLang; None where there is none.
        networks: that are not public, and that the URL of a server may lead to.

    Raises:
        InvalidSpec: this service cannot start what the spec asks for.
    """
    engine = spec.rollout.engine
    if isinstance(engine, SglangEngineConfig):
        if sglang_python is None and engine.url is None:
            raise InvalidSpec(
                "rollout.engine.kind sglang needs FLOTILLA_SGLANG_PYTHON on the rollout service, an interpreter that "
                "has SGLang, or rollout.engine.url"
            )
        return SglangEngine(sglang_settings(spec, engine, sglang_python, networks))
    return ProcessEngine(embedded_settings(spec, engine))


def embedded_settings(spec: ExperimentSpec, engine: TorchEngineConfig) -> EngineSettings:
    """Read what the embedded engine needs from a spec."""
    return EngineSettings(
        model_path=str(model_directory(spec.model)),
        dtype=spec.model.dtype,
        device=engine.device,
        slots=engine.slots,
        context_tokens=engine.context_tokens,
        threads=1 if engine.batch_invariant and engine.threads == "auto" else engine.threads,
        overlap_load=spec.asynchrony.publication.overlap_load is not False,
        batch_invariant=engine.batch_invariant,
    )


def sglang_settings(
    spec: ExperimentSpec, engine: SglangEngineConfig, python: Path | None, networks: tuple[IPNetwork, ...]
) -> SglangSettings:
    """Read what an SGLang engine needs from a spec."""
    return SglangSettings(
        model_path=model_directory(spec.model),
        python=python,
        url=engine.url,
        dtype=spec.model.dtype,
        device=engine.device,
        slots=engine.slots,
        context_tokens=engine.context_tokens,
        decodes=bool(spec.rollout.sampling.stop),
        options=engine.options,
        start_seconds=engine.start_seconds,
        load_seconds=engine.load_seconds,
        networks=networks,
    )


def offers(sglang_python: Path | None) -> tuple[EngineOffer, ...]:
    """List the engines that a service can use, and what each promises."""
    return (
        EngineOffer(kind="torch", capabilities=_in_order(TorchEngineConfig.CAPABILITIES)),
        EngineOffer(
            kind="sglang",
            can_start=sglang_python is not None,
            capabilities=_in_order(SglangEngineConfig.CAPABILITIES),
        ),
    )


def _in_order(capabilities: frozenset[EngineCapability]) -> tuple[EngineCapability, ...]:
    return tuple(each for each in EngineCapability if each in capabilities)
