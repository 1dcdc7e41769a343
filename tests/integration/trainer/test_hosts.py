"""Ranks on several hosts write the images and checkpoints that ranks on one host write, through the leader alone."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.trainer.checkpoint.files import paths_in, reserve, shared_files, write_shared
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.parallel.ranks import MeshShape, Ranks
from flotilla.services.trainer.weights.sharded_parameters import ShardedParameters
from flotilla.services.trainer.worker.follower import send_image, write_image
from flotilla.shared.checkpoints.folders import AVERAGE, CRITIC, MODEL, OPTIMIZER, VERSIONS
from flotilla.shared.models.hub import ADAPTER
from flotilla.shared.weights.image.image import WeightImage
from tests.integration.trainer.architectures import ARCHITECTURES
from tests.integration.trainer.ranks import run_ranks
from tests.unit.trainer.builders import a_model, a_spec, uneven_groups

pytestmark = [pytest.mark.timeout(300)]

FILES = (f"{MODEL}/model.safetensors", OPTIMIZER, VERSIONS, CRITIC)
ADAPTER_FILES = (f"{MODEL}/{ADAPTER}", OPTIMIZER, VERSIONS, AVERAGE)
FEW_BYTES = 500
"""Fewer than most weights here have: ranks send while others come to their next weight."""


@dataclass(frozen=True)
class Work:
    """What ranks train and where they write it."""

    directory: str
    architecture: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict)
    round_bytes: int = Ranks.round_bytes


def written(ranks: Ranks, work: Work) -> tuple[list[int], dict[str, bool]]:
    """Train a step, and write image and checkpoint as ranks of these hosts and as ranks of one; which are equal?"""
    directory = work.directory
    make = ARCHITECTURES.get(work.architecture, a_model)
    spec = a_spec(**{"samples": {}, "optimisation": {"steps": 1, "groups_per_mini_batch": 2}} | work.spec)
    ranks = replace(ranks, round_bytes=work.round_bytes)
    learner = Learner(spec, LoadedModel(make(), Path()), ranks=ranks)
    learner.train(uneven_groups(seed=1)[:2], 1)
    found = {}
    for name, each in (("hosts", ranks), ("one", replace(ranks, remote=frozenset()))):
        target = Path(directory) / name
        files = shared_files(learner)
        if each.is_leader:
            target.mkdir()
            reserve(target, files, Path(directory), learner)
        each.gather(b"")
        write_shared(paths_in(target, files), files, each)
        _write_image(each, learner.weights, target / "image")
        each.gather(b"")
    for name in sorted({*FILES, *ADAPTER_FILES, "image"}):
        pair = [Path(directory) / each / name for each in ("hosts", "one")]
        if pair[1].exists():
            found[name] = pair[0].read_bytes() == pair[1].read_bytes()
    return sorted(ranks.remote), found


def _write_image(ranks: Ranks, weights: object, path: Path) -> None:
    assert isinstance(weights, ShardedParameters)
    if ranks.is_leader:
        with WeightImage.create(weights.layout.image_bytes, directory=path.parent) as image:
            image.view[: len(weights.layout.header)] = weights.layout.header
            ranks.gather(str(image.path).encode())
            write_image(image.mapped, weights, ranks)
            ranks.gather(b"")
            path.write_bytes(image.view)
        return
    shared = Path(ranks.gather(b"")[0].decode())
    if ranks.is_remote:
        send_image(ranks, weights)
    else:
        with WeightImage.attach(shared) as image:
            write_image(image.mapped, weights, ranks)
    ranks.gather(b"")


AT_VERSION = {"algorithm": {"old_log_probs": "recompute_at_version"}}
WITH_CRITIC = {"algorithm": AT_VERSION["algorithm"] | {"advantage": {"kind": "gae"}}}
WITH_ADAPTERS = AT_VERSION | {
    "model": {"lora": {"rank": 4}},
    "optimisation": {"steps": 1, "groups_per_mini_batch": 2, "average_decay": 0.5},
}


@pytest.mark.parametrize("round_bytes", [FEW_BYTES, Ranks.round_bytes])
def test_two_hosts_write_what_one_writes(round_bytes: int, tmp_path: Path) -> None:
    work = Work(str(tmp_path), spec=WITH_CRITIC, round_bytes=round_bytes)

    (remote, found), *_ = run_ranks(written, work, hosts=("first", "second"))

    assert remote == [1]
    assert found == dict.fromkeys((*FILES, "image"), True)


def test_hosts_publish_adapters_whose_weights_need_every_rank_between_what_is_sent(tmp_path: Path) -> None:
    work = Work(str(tmp_path), spec=WITH_ADAPTERS, round_bytes=FEW_BYTES)

    (remote, found), *_ = run_ranks(written, work, hosts=("first", "second"))

    assert remote == [1]
    assert found == dict.fromkeys((*ADAPTER_FILES, "image"), True)


WEIGHTS = (AT_VERSION, FILES[:3])
ADAPTERS = (WITH_ADAPTERS, ADAPTER_FILES)


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "trained"),
    [
        pytest.param(MeshShape(4, expert=2), WEIGHTS, id="experts"),
        pytest.param(MeshShape(2, tensor=2), WEIGHTS, id="tensor"),
        pytest.param(MeshShape(2, replicate=2), WEIGHTS, id="replicas"),
        pytest.param(MeshShape(2, replicate=2), ADAPTERS, id="replicas and adapters"),
    ],
)
def test_divided_layers_and_experts_reach_the_leader_whole(
    shape: MeshShape, trained: tuple[Mapping[str, Any], tuple[str, ...]]
) -> None:
    spec, files = trained
    with tempfile.TemporaryDirectory() as directory:
        hosts = ("first", "first", "second", "second")
        work = Work(directory, "Qwen3-MoE", spec, FEW_BYTES)

        (remote, found), *_ = run_ranks(written, work, shape, hosts)

    assert remote == [2, 3]
    assert found == dict.fromkeys((*files, "image"), True)
