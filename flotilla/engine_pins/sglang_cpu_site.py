"""Lets SGLang run where there is no GPU: put into its environment's ``site-packages``, for tests on a CPU alone.

SGLang imports the packages of its GPU kernels wherever it runs. Here they are names that can be imported and decorated
with, and raise if one is ever executed. Only programs that say SGLANG_USE_CPU_ENGINE=1 get them.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

PACKAGES = ("triton", "torchvision", "sgl_kernel")
OPERATORS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""That modules of some models ask torch for when they are imported, among them the one that processes images."""


class Kernel:
    """A name that may be imported, called as a decorator or indexed, but never run."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.__name__ = self.__qualname__ = name.rpartition(".")[2]

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"a GPU kernel that is not there was executed: {self._name}")

    def __getitem__(self, _: Any) -> "Kernel":
        return self

    def __getattr__(self, name: str) -> "Kernel":
        if name.startswith("__"):
            raise AttributeError(name)
        return Kernel(f"{self._name}.{name}")


def jit(*arguments: Any, **options: Any) -> Any:
    """Stand for ``triton.jit``, with and without options."""
    if len(arguments) == 1 and callable(arguments[0]) and not options:
        return Kernel(getattr(arguments[0], "__name__", "kernel"))
    return lambda function: Kernel(getattr(function, "__name__", "kernel"))


class Absent(types.ModuleType):
    """A package that is not there, any of its modules, or a decorator of it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__file__ = None
        self.__version__ = "3.7.0"

    def __bool__(self) -> bool:
        return False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]
        return lambda function: function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        value = sys.modules.get(full) or self._made(name, full)
        setattr(self, name, value)
        return value

    def _made(self, name: str, full: str) -> Any:
        known: dict[str, Any] = {
            "cdiv": lambda a, b: -(-a // b),
            "next_power_of_2": lambda n: 1 << max(0, n - 1).bit_length(),
        }
        if full == "triton.jit":
            return jit
        if full in {"triton.autotune", "triton.heuristics"}:
            return lambda *_, **__: lambda function: function
        if name in known:
            return known[name]
        if name[:1].isupper() or name in {"constexpr", "dtype"}:
            return type(name, (), {"__init__": lambda self, *_, **__: None})
        return Kernel(full) if full.startswith("sgl_kernel.") else Absent(full)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages that are not there."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Claim a module of one of them."""
        if name.partition(".")[0] in self._packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Make it."""
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Run nothing."""


defined: Any = None
"""Those, which are gone with it."""


def install() -> None:
    """Let the packages be found from now on."""
    # transformers asks once which packages there are: it asks before these can be found.
    import transformers.utils.import_utils as probes

    for name in dir(probes):
        if name.startswith("is_") and name.endswith("_available"):
            with suppress(Exception):
                getattr(probes, name)()
    import torch

    global defined
    defined = torch.library.Library("sgl_kernel", "FRAGMENT")  # type: ignore[no-untyped-call]
    for each in OPERATORS:
        defined.define(f"{each}(Tensor x) -> ()")
    sys.meta_path.append(Finder([name for name in PACKAGES if importlib.util.find_spec(name) is None]))


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    install()
