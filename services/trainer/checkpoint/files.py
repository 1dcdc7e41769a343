"""The files of a checkpoint: whole tensors, whatever number of ranks writes them.

The leader makes them in their full size, headers included; then every rank writes its own elements where they belong.
So any number of ranks continues from a checkpoint of any other.
"""

import copy
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.quantised import described
from flotilla.services.trainer.models.versions import VersionedWeights
from flotilla.services.trainer.parallel.ranks import ONE_RANK, Ranks
from flotilla.services.trainer.parallel.remote_parts import receive_parts, send_parts
from flotilla.services.trainer.weights.parts import (
    Part,
    layout_of_tensors,
    map_file,
    part_of,
    reserve_file,
    write_parts,
    write_whole_parts,
)
from flotilla.services.trainer.weights.sharded_parameters import ShardedParameters
from flotilla.shared.checkpoints.folders import AVERAGE, CRITIC, MODEL, OPTIMIZER, VERSIONS
from flotilla.shared.config.sections.checkpoint import EVERYTHING, Content
from flotilla.shared.models.hub import ADAPTER, ADAPTER_CONFIG
from flotilla.shared.weights.image.layout import ImageLayout
from flotilla.shared.weights.image.tensors import safetensors_name

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, eq=False)
class SharedFile:
    """One file, and what this rank has of it; without a layout it holds no tensor."""

    name: str
    layout: ImageLayout | None
    parts: list[Part]


def shared_files(learner: Learner, contents: Sequence[Content] = EVERYTHING) -> list[SharedFile]:
    """List the files with tensors of a checkpoint of this learner that holds ``contents``."""
    is_leader = learner.ranks.is_leader
    has_optimizer, has_extra = "optimizer" in contents, "extra" in contents
    files = [_weights(learner)]
    if has_optimizer:
        files.append(_of_tensors(OPTIMIZER, learner.optimizer.state(), is_leader=is_leader))
    if learner.versions is not None and has_extra:
        files.append(_versions(learner.versions, learner.ranks))
    if learner.critic is not None:
        files.append(_of_tensors(CRITIC, learner.critic.state(with_optimizer=has_optimizer), is_leader=is_leader))
    if learner.average is not None and has_extra:
        files.append(_of_tensors(AVERAGE, learner.average.state(), is_leader=is_leader))
    return files


def _weights(learner: Learner) -> SharedFile:
    is_leader = learner.ranks.is_leader
    if learner.adapters is not None:
        return _of_tensors(f"{MODEL}/{ADAPTER}", learner.adapters.tensors(), is_leader=is_leader)
    model = learner.loaded.model
    weights = ShardedParameters(model, is_leader=is_leader)
    parts = list(weights.image_parts())
    buffers = _persistent_buffers(model)
    shapes = {spec.name: (spec.shape, spec.dtype) for spec in weights.layout.tensors}
    # After the weights: those of one dtype must follow one another.
    shapes |= {name: (tuple(each.shape), safetensors_name(each.dtype)) for name, each in buffers.items()}
    parts += [part_of(each, name, is_leader=is_leader) for name, each in buffers.items()]
    return SharedFile(f"{MODEL}/{WEIGHTS}", ImageLayout.of(shapes), parts)


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """List what a checkpoint of the model holds that is no parameter, such as what balances experts."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def _versions(versions: VersionedWeights, ranks: Ranks) -> SharedFile:
    if not ranks.is_several:
        return _of_tensors(VERSIONS, versions.state(), is_leader=True)
    shapes, parts = versions.parts()
    layout = ImageLayout.of({name: (shape, safetensors_name(dtype)) for name, (shape, dtype) in shapes.items()})
    return SharedFile(VERSIONS, layout, parts)


def paths_in(directory: Path, files: Iterable[SharedFile]) -> dict[str, Path]:
    """Return where the files with tensors are below a directory."""
    return {file.name: directory / file.name for file in files if file.layout is not None}


def reserve(directory: Path, files: list[SharedFile], source: Path, learner: Learner) -> None:
    """Make the files in their full size, and all that is no tensor beside the weights.

    Args:
        directory: of the checkpoint.
        files: of this rank, whose layouts are those of all.
        source: the directory that tokenizer and templates are taken from.
        learner: whose configuration is written.

    Raises:
        OSError: the disk has no room.
    """
    write_companions(directory, source, learner)
    for file in files:
        if file.layout is None:
            save_file({}, directory / file.name)
        else:
            reserve_file(directory / file.name, file.layout)


def write_companions(directory: Path, source: Path, learner: Learner) -> None:
    """Write all of a checkpoint's model but its weights. Arguments as of ``reserve``."""
    (directory / MODEL).mkdir()
    describe_model(directory / MODEL, learner)
    copy_companions(source, directory / MODEL)


def describe_model(directory: Path, learner: Learner) -> None:
    """Write a model's configuration, and that of adapters, beside its weights."""
    model = learner.loaded.model
    config: Any = model.config
    if (quantisation := learner.spec.model.quantisation) is not None:
        config = copy.deepcopy(config)
        config.quantization_config = described(quantisation, config.dtype)
    config.save_pretrained(directory)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(directory)  # type: ignore[union-attr, operator]
    if learner.adapters is not None:
        base = learner.spec.model
        found = learner.adapters.peft_config(base.path, base.revision)
        (directory / ADAPTER_CONFIG).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def write_shared(paths: Mapping[str, Path], files: list[SharedFile], ranks: Ranks = ONE_RANK) -> None:
    """Write what this rank has; the leader also what the ranks of other hosts have, which send it here.

    Args:
        paths: of the files, by name; on disk or in the host's memory.
        files: of this rank.
        ranks: the job.

    Two hosts that write into one page of a file would overwrite each other's elements: no network file system merges
    pages.

    Raises:
        OSError: the disk fails; what others send has been received all the same.
    """
    failure: OSError | None = None
    for file in files:
        if file.layout is None:
            continue
        if ranks.is_remote:
            send_parts(ranks, file.layout, file.parts)
            continue
        mapped = None
        try:
            if failure is None:
                others = write_whole_parts(paths[file.name], file.layout, file.parts)
                mapped = map_file(paths[file.name]) if others or ranks.remote else None
        except OSError as error:
            failure = error
        if mapped is not None:
            write_parts(mapped, file.layout, others)
        if ranks.is_leader:
            receive_parts(ranks, file.layout, mapped, file.parts)
    if failure is not None:
        raise failure


def copy_companions(source: Path, directory: Path) -> None:
    """Copy tokenizer, chat template and whatever else belongs to a model's directory, but no other weights."""
    for path in source.iterdir():
        is_wanted = path.is_file() and path.suffix not in _WEIGHT_SUFFIXES and not path.name.endswith(".index.json")
        if is_wanted and path.name not in _WRITTEN_WITH_WEIGHTS:
            shutil.copyfile(path, directory / path.name)


_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf"})
_WRITTEN_WITH_WEIGHTS = frozenset({"config.json", "generation_config.json", ADAPTER_CONFIG})


def _of_tensors(name: str, tensors: Mapping[str, Tensor], *, is_leader: bool) -> SharedFile:
    # In one order, whatever order they were made or loaded in: equal training gives equal bytes.
    tensors = {key: tensors[key] for key in sorted(tensors)}
    # No update was applied yet: the optimiser has no state.
    layout = layout_of_tensors(tensors) if tensors else None
    return SharedFile(name, layout, [part_of(tensor, key, is_leader=is_leader) for key, tensor in tensors.items()])
