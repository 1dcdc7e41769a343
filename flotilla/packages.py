"""Which packages and programs a fleet on this machine needs, looked for before anything is started."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec

from flotilla.shared.config.sections.engine import ServerEngineConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.environment.settings import ENGINE_PYTHONS, engine_pythons_from
from flotilla.shared.errors import InvalidSpec, Unavailable

LOCAL_FLEET = ("torch", "transformers", "safetensors", "jinja2")
"""Of rollouts and trainer; everything else is a dependency of the package."""


def _is_installed(name: str) -> bool:
    return find_spec(name) is not None


def check_packages(is_installed: Callable[[str], bool] = _is_installed) -> None:
    """Check that rollouts and trainers can start here; nothing is imported.

    Raises:
        Unavailable: a package is missing; one sentence names it and the command that installs it.
    """
    missing = [name for name in LOCAL_FLEET if not is_installed(name)]
    if missing:
        *others, last = missing
        are, named = ("are", f"{', '.join(others)} and {last}") if others else ("is", last)
        raise Unavailable(
            f"{named} {are} not installed, which rollouts and trainers need: "
            "pip install 'flotilla[torch]' (in a checkout: pip install '.[torch]'); see docs/install.md"
        )


def check_quantisation(spec: ExperimentSpec, is_installed: Callable[[str], bool] = _is_installed) -> None:
    """Check that a trainer on this machine can pack weights if the spec asks for it; nothing is imported.

    Raises:
        InvalidSpec: bitsandbytes is missing.
    """
    if spec.model.quantisation is not None and not is_installed("bitsandbytes"):
        raise InvalidSpec(
            "model.lora.quantisation needs bitsandbytes, which is not installed here: pip install "
            "'flotilla[bitsandbytes]' (in a checkout: pip install '.[bitsandbytes]'), or leave quantisation out"
        )


def check_engine(spec: ExperimentSpec, environment: Mapping[str, str]) -> None:
    """Check that rollouts of a fleet with this environment can start the engine: else the experiment waits for ever.

    Raises:
        InvalidSpec: they cannot.
    """
    engine = spec.rollout.engine
    if not isinstance(engine, ServerEngineConfig) or engine.url is not None:
        return
    if engine.kind not in engine_pythons_from(environment):
        raise InvalidSpec(
            f"rollout.engine.kind {engine.kind} needs {ENGINE_PYTHONS[engine.kind]}, the interpreter of an environment "
            f"that has it (docs/engines.md), or rollout.engine.url, the address of a server"
        )
