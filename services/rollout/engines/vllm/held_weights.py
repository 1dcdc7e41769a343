"""Runs inside a vLLM server's worker: hashes of the weights that its layers multiply by, and packs those of tied heads.

It imports nothing of Flotilla.

The server is started with a copy of this file as its worker extension, and asked by ``/collective_rpc``. A CPU layer
packs its weights for its kernel and forgets the plain ones: they are read back as what it makes of unit vectors.
Each product is a weight times 1 with zeros added, so it is that weight to the last bit, but for the sign of a zero.
"""

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

TWO = "0" * 64
"""In the place of a hash where a layer holds its weight twice, and they differ, or more than was loaded."""
ROWS = 512
"""Unit vectors that a layer is given at a time."""


class HeldWeights:
    """What a vLLM worker can do besides: vLLM makes it one of the worker's classes."""

    model_runner: Any

    def flotilla_hashes(self) -> dict[str, str]:
        """Hash each weight that computes as one tensor: SHA-256 by the parameter's name, zeros without a sign."""
        model = self.model_runner.get_model()
        # One thread hashes what another has read back, a product ahead.
        with torch.inference_mode(), ThreadPoolExecutor(1) as hashing:
            hashed: list[tuple[str, Future[str]]] = []
            for prefix, module in model.named_modules():
                for name, parameter in module.named_parameters(recurse=False):
                    # A layer that takes adapters has the plain one inside.
                    path = f"{prefix}.{name}".removeprefix(".").replace(".base_layer.", ".")
                    if parameter.numel():
                        hashed.append((path, hashing.submit(_hash, _without_padding(module, parameter.data))))
                    packed = _multiplied_by(module) if name == "weight" else None
                    if packed is not None:
                        hashed.append((path, hashing.submit(_hash_of_columns, module, packed)))
                    for _, earlier in hashed[-3:-2]:
                        earlier.result()
            found: dict[str, str] = {}
            for path, future in hashed:
                # An embedding has both, for looking up and for the head.
                found[path] = future.result() if found.get(path, future.result()) == future.result() else TWO
        return found

    def flotilla_pack_tied(self) -> list[str]:
        """Pack weights that several layers share, and name the layers; on a CPU, after each load.

        A layer is packed when its own weights were loaded: a head that is the embedding would keep its first ones.
        """
        sharing: dict[int, list[tuple[str, Any]]] = {}
        for name, module in self.model_runner.get_model().named_modules():
            weight = dict(module.named_parameters(recurse=False)).get("weight")
            if weight is not None and weight.numel() and hasattr(module, "cpu_linear"):
                sharing.setdefault(weight.data_ptr(), []).append((name, module))
        tied = [each for layers in sharing.values() if len(layers) > 1 for each in layers]
        for _, module in tied:
            module.quant_method.process_weights_after_loading(module)
        return [name for name, _ in tied]

    def flotilla_adapter_hashes(self, rank: int) -> dict[str, str]:
        """Hash A and scaled B of the adapter that was loaded last, by layer and part; zeros without a sign."""
        manager, found = self.model_runner.lora_manager._adapter_manager, {}
        place = manager.lora_index_to_id.index(max(manager.list_adapters()))
        for name, module in manager.modules.items():
            lows, highs = (getattr(module, each, None) for each in ("lora_a_stacked", "lora_b_stacked"))
            if not isinstance(lows, tuple) or not isinstance(highs, tuple):
                continue
            for part in range(len(lows)):
                low, high = lows[part][place, 0], highs[part][place, 0]
                if low[rank:].any() or high[:, rank:].any():
                    found[f"{name}.{part}"] = TWO
                elif low.any() or high.any():
                    found[f"{name}.{part}"] = _hash(low[:rank], high[:, :rank])
        return found


def _multiplied_by(module: Any) -> list[torch.Tensor] | None:
    """Read the weight of a layer that has packed it: parts of [inputs, outputs]; None where nothing is packed."""
    linear = getattr(module, "cpu_linear", None)
    if linear is None or linear is torch.nn.functional.linear:
        return None
    num_inputs = getattr(module, "input_size_per_partition", None) or getattr(module, "embedding_dim", None)
    if num_inputs is None:
        return None
    dtype = module.weight.dtype
    columns = []
    for start in range(0, num_inputs, ROWS):
        units = torch.zeros(min(ROWS, num_inputs - start), num_inputs, dtype=dtype)
        units[torch.arange(len(units)), start + torch.arange(len(units))] = 1
        columns.append(linear(units, module.weight, None))
    return columns


def _hash_of_columns(module: Any, parts: list[torch.Tensor]) -> str:
    with torch.inference_mode():
        return _hash(_without_padding(module, torch.cat([part.T for part in parts], dim=1)))


def _without_padding(module: Any, held: torch.Tensor) -> torch.Tensor:
    rows = getattr(module, "org_vocab_size", None)
    return held if rows is None else held[:rows]


def _hash(*held: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for each in held:
        # A product with zeros has no negative zero.
        whole = (each + 0).contiguous().cpu()
        digest.update(whole.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
