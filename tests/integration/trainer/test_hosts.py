"""Ranks on several hosts write the images and checkpoints that ranks on one host write, through the leader alone."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from services.trainer.checkpoint.files import paths_in, reserve, shared_files, write_shared
from services.trainer.learning.learner import Learner
from services.trainer.models.loading import LoadedModel
from services.trainer.parallel.ranks import MeshShape, Ranks
from services.trainer.parallel.remote_parts import receive_parts
from services.trainer.worker.follower import send_image, write_image
from shared.checkpoints import CRITIC, MODEL, OPTIMIZER, VERSIONS
from shared.weights.image import WeightImage
from shared.weights.sharded_parameters import ShardedParameters
from tests.integration.trainer.architectures import ARCHITECTURES
from tests.integration.trainer.ranks import run_ranks
from tests.unit.trainer.builders import a_model, a_spec, uneven_groups

pytestmark = [pytest.mark.timeout(300)]

FILES = (f"{MODEL}/model.safetensors", OPTIMIZER, VERSIONS, CRITIC)


def written(ranks: Ranks, work: tuple[str, str]) -> tuple[list[int], dict[str, bool]]:
    """Train a step, and write image and checkpoint as ranks of these hosts and as ranks of one; which are equal?"""
    architecture, directory = work
    make = ARCHITECTURES.get(architecture, a_model)
    algorithm = {"old_log_probs": "recompute_at_version"}
    if architecture not in ARCHITECTURES:
        algorithm |= {"advantage": {"kind": "gae"}}
    optimisation = {"steps": 1, "groups_per_mini_batch": 2}
    learner = Learner(
        a_spec(algorithm=algorithm, optimisation=optimisation, samples={}), LoadedModel(make(), Path()), ranks=ranks
    )
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
    for name in (*FILES, "image"):
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
            write_image(image.mapped, weights)
            receive_parts(ranks, weights.layout, image.mapped)
            ranks.gather(b"")
            path.write_bytes(image.view)
        return
    shared = Path(ranks.gather(b"")[0].decode())
    if ranks.is_remote:
        send_image(ranks, weights)
    else:
        with WeightImage.attach(shared) as image:
            write_image(image.mapped, weights)
    ranks.gather(b"")


def test_two_hosts_write_what_one_writes(tmp_path: Path) -> None:
    (remote, found), *_ = run_ranks(written, ("", str(tmp_path)), hosts=("first", "second"))

    assert remote == [1]
    assert found == dict.fromkeys((*FILES, "image"), True)


@pytest.mark.long
@pytest.mark.parametrize("shape", [MeshShape(4, expert=2), MeshShape(2, tensor=2), MeshShape(2, replicate=2)], ids=str)
def test_divided_layers_and_experts_reach_the_leader_whole(shape: MeshShape) -> None:
    with tempfile.TemporaryDirectory() as directory:
        hosts = ("first", "first", "second", "second")
        (remote, found), *_ = run_ranks(written, ("Qwen3-MoE", directory), shape, hosts)

    assert remote == [2, 3]
    assert found == dict.fromkeys((*FILES[:3], "image"), True)
