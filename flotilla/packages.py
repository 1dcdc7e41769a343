"""Which packages a fleet on this machine needs, looked for before anything is started."""

from collections.abc import Callable
from importlib.util import find_spec

from shared.errors import Unavailable

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
        are = "is" if len(missing) == 1 else "are"
        raise Unavailable(
            f"{' and '.join(missing)} {are} not installed, which rollouts and trainers need: "
            "pip install 'flotilla[torch]' (in a checkout: pip install '.[torch]'); see docs/install.md"
        )
