"""Training beside weights in 4 bits: with rollouts that have what is published, through crashes, and on two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flotilla.services.trainer.checkpoint.files import paths_in, reserve, shared_files, write_shared
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import load_model
from flotilla.services.trainer.parallel.ranks import ONE_RANK, Ranks
from flotilla.services.trainer.weights.sharded_parameters import StreamedParameters
from flotilla.services.trainer.worker.images import ImagePool
from flotilla.shared.checkpoints.folders import AVERAGE, MODEL, OPTIMIZER
from flotilla.shared.config.load.spec_text import with_changes
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.models.hub import ADAPTER
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from tests.fleet import tiny_model
from tests.integration.trainer.fleet import YesGateway, a_spec, save_tiny_model, train
from tests.integration.trainer.ranks import image_of_one, image_of_ranks, run_ranks
from tests.integration.trainer.test_crash_replay import Crash, crash_once, files_of
from tests.unit.trainer.builders import a_spec as a_small_spec
from tests.unit.trainer.builders import uneven_groups

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install '.[bitsandbytes]'")


def spec_of(path: Path, **lora: Any) -> ExperimentSpec:
    spec = a_spec(
        path,
        algorithm={"old_log_probs": "recompute", "kl": {"placement": "loss"}},
        optimisation={"steps": 4, "groups_per_mini_batch": 2, "learning_rate": 1e-2},
    )
    return with_changes(spec, {"model": {"lora": {"rank": 4, "quantisation": {"dtype": "nf4"}, **lora}}})


async def test_rollouts_sample_with_what_the_trainer_computes_with_from_the_first_step_on(tmp_path: Path) -> None:
    plane = MemoryDataPlane()
    gateway = YesGateway(plane)

    assert await train(spec_of(save_tiny_model(tmp_path / "model")), tmp_path / "run", plane, gateway)

    assert gateway.published == [2, 3, 4, 5]
    differences = [gateway.metrics[step]["correction/probability_difference"] for step in (1, 2, 3, 4)]
    assert max(differences) < 1e-5, differences
    assert gateway.metrics[1]["kl/mean"] == pytest.approx(0, abs=1e-6)
    assert gateway.metrics[4]["kl/mean"] > 0


@pytest.mark.parametrize(
    ("owner", "name", "at_call"), [(Learner, "train", 4), (Learner, "train", 1), (ImagePool, "snapshot", 1)]
)
async def test_after_a_crash_training_goes_on_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, at_call: int
) -> None:
    spec = spec_of(save_tiny_model(tmp_path / "model"), dropout=0.2)
    undisturbed = MemoryDataPlane()
    await train(spec, tmp_path / "undisturbed", undisturbed, YesGateway(undisturbed))
    plane = MemoryDataPlane()
    gateway = YesGateway(plane)

    with monkeypatch.context() as patched:
        crash_once(patched, owner, name, at_call=at_call)
        with pytest.raises((ExceptionGroup, Crash)):
            await train(spec, tmp_path / "run", plane, gateway)
        assert await train(spec, tmp_path / "run", plane, gateway)

    found, expected = files_of(tmp_path / "run", 4), files_of(tmp_path / "undisturbed", 4)
    assert found.keys() == {"model/adapter_model.safetensors", "optimizer.safetensors"}
    assert found == expected


def compared(ranks: Ranks, places: tuple[str, str]) -> dict[str, float]:
    """Train a model on this job and alone; returns how far apart they end, and writes a checkpoint."""
    directory, model = places
    several, together = trained(Path(model), ranks)
    one, alone = trained(Path(model), ONE_RANK)
    image, expected = image_of_ranks(several.weights, ranks), image_of_one(one.weights)
    assert isinstance(one.weights, StreamedParameters)
    assert image.keys() == expected.keys()
    files = shared_files(several)
    if ranks.is_leader:
        reserve(Path(directory), files, Path(model), several)
    ranks.gather(b"")
    write_shared(paths_in(Path(directory), files), files)
    ranks.gather(b"")
    average = load_file(Path(directory) / AVERAGE)
    assert one.average is not None
    return {
        "losses": max(abs(a - b) for a, b in zip(together, alone, strict=True)),
        "image": max(float((image[key] - expected[key]).abs().max()) for key in image),
        "average": max(float((average[key] - each).abs().max()) for key, each in one.average.state().items()),
        "next": several.train(uneven_groups(2, seed=9), 4).metrics["loss/total"],
    }


def rank_spec(model: Path) -> ExperimentSpec:
    return a_small_spec(
        model={"path": str(model), "lora": {"rank": 4, "quantisation": {"dtype": "nf4"}}},
        algorithm={"kl": {"placement": "loss"}, "old_log_probs": "recompute"},
        optimisation={
            "steps": 5,
            "groups_per_mini_batch": 2,
            "learning_rate": 1e-2,
            "epsilon": 1e-6,
            "average_decay": 0.5,
        },
    )


def trained(model: Path, ranks: Ranks) -> tuple[Learner, list[float]]:
    spec = rank_spec(model)
    cpu = torch.device("cpu")
    loaded = load_model(
        model, dtype="float32", device=cpu, in_parts=ranks.is_several, quantisation=spec.model.quantisation
    )
    learner = Learner(spec, loaded, ranks=ranks)
    return learner, [learner.train(uneven_groups(2, seed=step), step).metrics["loss/total"] for step in (1, 2, 3)]


def test_two_ranks_learn_publish_and_keep_what_one_does(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()

    first, second = run_ranks(compared, (str(folder), str(tiny_model())))

    assert first["losses"] < 1e-5, first
    assert first["image"] < 1e-5, first
    assert first["average"] < 1e-5, first
    alone, _ = trained(tiny_model(), ONE_RANK)
    assert alone.adapters is not None
    alone.adapters.load(load_file(folder / MODEL / ADAPTER))
    alone.optimizer.load(load_file(folder / OPTIMIZER), updates=3)
    assert abs(alone.train(uneven_groups(2, seed=9), 4).metrics["loss/total"] - first["next"]) < 1e-5
    assert first == second
