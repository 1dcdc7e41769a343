"""Lets torchvision be imported beside torch for CPUs: put into an engine's environment, where a ``.pth`` imports it.

The registry's build of torchvision is for GPUs: its own operators cannot be loaded here, and importing it fails where
two of them are described that nobody has defined. They are defined before, and never computed: what processors of
images use is plain torch.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

DESCRIBED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class Finder(importlib.abc.MetaPathFinder):
    """Defines the operators when torchvision is searched for, and finds nothing itself."""

    library: Any = None

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Look at the name."""
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
            for each in DESCRIBED:
                self.library.define(each)
        return None


sys.meta_path.insert(0, Finder())
