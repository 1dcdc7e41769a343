"""From the name of an environment to the object: ours, one in a file, one of gymnasium, or one behind a server."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from flotilla.services.rollout.environments.base import Environment
from flotilla.services.rollout.environments.countdown import Countdown
from flotilla.services.rollout.environments.frozen_lake import FrozenLake
from flotilla.services.rollout.environments.gymnasium_text import GymnasiumText
from flotilla.services.rollout.environments.openenv import OpenEnv
from flotilla.services.rollout.environments.simulated_user import SimulatedUser
from flotilla.services.rollout.environments.sokoban import Sokoban
from flotilla.services.rollout.environments.word_game import WordGame
from flotilla.shared.children.custom_code import load_callable
from flotilla.shared.config.sections.episodes import GYMNASIUM, OPENENV, USER, EnvironmentConfig
from flotilla.shared.environment.settings import LOOPBACK, IPNetwork
from flotilla.shared.errors import FlotillaError, InvalidSpec
from flotilla.shared.net.absence import absent_or

BUILT_IN: Final[Mapping[str, type[Any]]] = {
    "frozen_lake": FrozenLake,
    "sokoban": Sokoban,
    "countdown": Countdown,
    "word_game": WordGame,
}


def load_environment(
    config: EnvironmentConfig, networks: Sequence[IPNetwork] = LOOPBACK
) -> Callable[[], Environment | OpenEnv | SimulatedUser]:
    """Load an environment's class, and make one to see that it can be made.

    Args:
        config: of the environment.
        networks: that are not public, and that its URL may lead to.

    Returns:
        What makes an environment, for one episode.

    Raises:
        InvalidSpec: there is no such environment, or it does not take the options.
    """
    name, options = config.environment, config.options
    if name in BUILT_IN:
        make: Callable[..., Any] = BUILT_IN[name]
    elif name.startswith(GYMNASIUM):
        make = partial(GymnasiumText, name.removeprefix(GYMNASIUM))
    elif config.is_server:
        kind: Callable[..., Any] = SimulatedUser if config.is_user else OpenEnv
        make = partial(kind, name.removeprefix(OPENENV).removeprefix(USER), networks=networks)
        if "networks" in options:
            raise InvalidSpec(
                f"environment {name!r} does not take the option networks: it is a setting of the rollout service"
            )
    else:
        make = load_callable(name, what="environment", kind="class", accepts=inspect.isclass)
    try:
        made = make(**options)
    except (TypeError, ValueError) as error:
        raise InvalidSpec(f"environment {name!r} does not take the options {dict(options)}: {error}") from error
    except FlotillaError:
        raise
    except Exception as error:  # whatever the user's constructor raises
        words = f"environment {name!r} cannot be made: {type(error).__name__}: {error}"
        raise absent_or(error, InvalidSpec(words)) from error
    for method in ("reset", "step"):
        if not callable(getattr(made, method, None)):
            raise InvalidSpec(f"environment {name!r} has no method {method}")
    return partial(make, **options)


def needs_no_thread(config: EnvironmentConfig) -> bool:
    """Whether its methods take microseconds, or are coroutines that wait for another process."""
    return config.environment in BUILT_IN or config.is_code or config.is_server
