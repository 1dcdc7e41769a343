"""One module per system: upstream function to the call of ours that corresponds to it."""

from collections.abc import Callable
from typing import Any

from tests.goldens.adapters import areal, openrlhf, prime_rl, roll, skyrl, verl
from tests.goldens.case import Case, NotOffered

Adapter = Callable[[Case], dict[str, Any]]

ADAPTERS: dict[str, dict[str, Adapter]] = {
    "verl": verl.ADAPTERS,
    "openrlhf": openrlhf.ADAPTERS,
    "roll": roll.ADAPTERS,
    "areal": areal.ADAPTERS,
    "skyrl": skyrl.ADAPTERS,
    "prime_rl": prime_rl.ADAPTERS,
}


def adapter_for(case: Case) -> Adapter:
    """Find the adapter of a case's system and function.

    Raises:
        NotOffered: there is none.
    """
    functions = ADAPTERS.get(case.system.replace("-", "_"))
    if functions is None:
        raise NotOffered(f"no adapter for the system {case.system}")
    for part in (case.function, *case.function.split(" + ")):
        if part in functions:
            return functions[part]
    raise NotOffered(f"no adapter for {case.function}")
