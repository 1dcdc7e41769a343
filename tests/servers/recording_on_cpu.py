"""Starts SGLang, in its own environment, so that it records experts on a CPU: their memory is plain, not CUDA's.

Run as ``python recording_on_cpu.py -m MODULE ARGUMENTS``; processes that SGLang spawns read this file as well.
"""

import runpy
import sys
from typing import Any


def plain(dims: Any, dtype: Any, device: str, **_: Any) -> Any:
    """Allocate what SGLang would pin for a GPU."""
    import torch

    return torch.zeros(dims, dtype=dtype, device=device)


def install() -> None:
    """Let it have such memory."""
    from sglang.srt.mem_cache.pool_host import common  # type: ignore[import-not-found]

    common.ALLOC_MEMORY_FUNCS["cpu"] = plain


if __name__ in {"__main__", "__mp_main__"}:
    install()
if __name__ == "__main__":
    module, sys.argv = sys.argv[2], sys.argv[2:]
    runpy.run_module(module, run_name="__main__")
