"""Makes the engine that a spec asks for, and lists those that a service can use."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from flotilla.services.rollout.engines.base import Engine
from flotilla.services.rollout.engines.own import embedded_engine
from flotilla.services.rollout.engines.servers.settings import AdapterSettings, ServerSettings
from flotilla.services.rollout.engines.sglang.buckets import BucketProcess
from flotilla.services.rollout.engines.sglang.engine import SglangEngine
from flotilla.services.rollout.engines.sglang.group_engine import GroupSglangEngine
from flotilla.services.rollout.engines.vllm.engine import VllmEngine
from flotilla.shared.config.rules.devices import split_sizes
from flotilla.shared.config.sections.engine import (
    Options,
    ServerEngineConfig,
    SglangEngineConfig,
    TorchEngineConfig,
    VllmEngineConfig,
)
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.environment.settings import ENGINE_PYTHONS, LOOPBACK, IPNetwork
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.host.start_patience import patient
from flotilla.shared.models.hub import model_directory
from flotilla.shared.schemas.engine import EngineCapability, EngineOffer
from flotilla.shared.service.devices import decided_here

TENSOR_PARALLEL = {"sglang": "tp_size", "vllm": "tensor_parallel_size"}
"""The argument that divides a model among devices, by the engine's kind."""


def make_engine(
    spec: ExperimentSpec,
    pythons: Mapping[str, Path],
    networks: tuple[IPNetwork, ...] = LOOPBACK,
    host: str | None = None,
    check: Callable[[str], None] | None = None,
) -> Engine:
    """Make the engine, not yet started; a hub's model has been fetched before.

    Args:
        spec: of the experiment.
        pythons: interpreters that have an engine, by its kind.
        networks: that are not public, and that the URL of a server may lead to.
        host: address of this service.
        check: called with the folder of a dump; raises where that is not allowed.

    Raises:
        InvalidSpec: this service cannot start what the spec asks for.
    """
    spec = decided_here(spec)
    engine = spec.rollout.engine
    if isinstance(engine, TorchEngineConfig):
        return embedded_engine(spec, engine, check)
    python = pythons.get(engine.kind)
    if python is None and engine.url is None:
        raise InvalidSpec(
            f"rollout.engine.kind {engine.kind} needs {ENGINE_PYTHONS[engine.kind]} on the rollout service, an "
            f"interpreter that has it, or rollout.engine.url"
        )
    settings = server_settings(spec, engine, python, networks)
    if spec.sends_to_engines:
        return GroupSglangEngine(replace(settings, group_host=host), backend="nccl" if spec.uses_nccl else "gloo")
    if isinstance(engine, SglangEngineConfig):
        takes_handles = engine.update_weights_from == "tensor"
        return SglangEngine(
            settings, buckets=BucketProcess(engine.device, engine.load_seconds) if takes_handles else None
        )
    sampling = spec.rollout.sampling
    return VllmEngine(settings, raw=sampling.is_cut and sampling.temperature == 1)


def server_settings(
    spec: ExperimentSpec, engine: ServerEngineConfig, python: Path | None, networks: tuple[IPNetwork, ...]
) -> ServerSettings:
    """Read what an engine behind a server needs from a spec."""
    return ServerSettings(
        model_path=model_directory(spec.model),
        python=python,
        url=engine.url,
        dtype=spec.model.dtype,
        device=engine.device,
        slots=engine.slots,
        context_tokens=engine.context_tokens,
        decodes=bool(spec.rollout.sampling.stop),
        options=_options(spec, engine),
        sleeps=spec.shares_devices,
        start_seconds=patient(engine.start_seconds),
        load_seconds=engine.load_seconds,
        networks=networks,
        records_experts=spec.algorithm.router_replay == "R3",
        adapters=_adapters(spec),
        images=spec.data.images,
    )


def _adapters(spec: ExperimentSpec) -> AdapterSettings | None:
    """Return which adapters a server adds itself; none while whole weights are published."""
    lora = spec.model.lora
    is_alone = lora is not None and spec.asynchrony.publication.lora == "adapters"
    return AdapterSettings(spec.name, lora.rank) if lora is not None and is_alone else None


def _options(spec: ExperimentSpec, engine: ServerEngineConfig) -> Options:
    """Divide the model among the devices that are asked for, if the options do not."""
    count = spec.resources.rollouts.devices
    if count in {"auto", 1} or split_sizes(engine.options):
        return engine.options
    return {**engine.options, TENSOR_PARALLEL[engine.kind]: count}


def offers(pythons: Mapping[str, Path], *, has_gpus: bool) -> tuple[EngineOffer, ...]:
    """List the engines that a service can use, and what each promises there.

    Args:
        pythons: interpreters that have an engine, by its kind.
        has_gpus: whether there is a GPU: servers free memory there alone.
    """
    kept = frozenset(EngineCapability) - (frozenset() if has_gpus else {EngineCapability.SLEEP})
    servers: Mapping[str, type[ServerEngineConfig]] = {"sglang": SglangEngineConfig, "vllm": VllmEngineConfig}
    return (
        EngineOffer(
            kind="torch",
            capabilities=_in_order(TorchEngineConfig.CAPABILITIES),
            takes_adapters=TorchEngineConfig.TAKES_ADAPTERS,
        ),
        *(
            EngineOffer(
                kind=kind,
                can_start=kind in pythons,
                capabilities=_in_order(config.CAPABILITIES & kept),
                takes_adapters=config.TAKES_ADAPTERS,
            )
            for kind, config in servers.items()
        ),
    )


def _in_order(capabilities: frozenset[EngineCapability]) -> tuple[EngineCapability, ...]:
    return tuple(each for each in EngineCapability if each in capabilities)
