"""Adapters on several ranks: what is learned, published and kept is what one rank has."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from flotilla.services.trainer.checkpoint.files import paths_in, reserve, shared_files, write_shared
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.parallel.ranks import Ranks
from flotilla.services.trainer.weights.flat_parameters import FlatParameters
from flotilla.shared.checkpoints.folders import AVERAGE, MODEL, OPTIMIZER
from flotilla.shared.models.hub import ADAPTER
from tests.integration.trainer.architectures import ARCHITECTURES
from tests.integration.trainer.ranks import image_of_one, image_of_ranks, run_ranks, stored
from tests.unit.trainer.builders import a_spec, uneven_groups

NAMES = ("Qwen3", "GPT-2", "Qwen3-MoE")
# A rank below the number of training ranks leaves one of them without rows of A.
LORA = {"Qwen3": {"rank": 4}, "GPT-2": {"rank": 1}, "Qwen3-MoE": {"rank": 3}}


def compared(ranks: Ranks, directory: str) -> dict[str, dict[str, float]]:
    """Train each model on this job and alone; returns how far apart they end, and writes a checkpoint of the last."""
    found = {}
    for name in NAMES:
        several, together = _trained(name, ranks)
        one, alone = _trained(name, None)
        image, expected = image_of_ranks(several.weights, ranks), image_of_one(one.weights)
        assert isinstance(one.weights, FlatParameters)
        assert image.keys() == expected.keys()
        found[name] = {
            "losses": max(abs(a - b) for a, b in zip(together, alone, strict=True)),
            "image": max(float((image[key] - expected[key]).abs().max()) for key in image),
        }
    files = shared_files(several)
    if ranks.is_leader:
        reserve(Path(directory), files, Path(directory).parent, several)
    ranks.gather(b"")
    write_shared(paths_in(Path(directory), files), files)
    ranks.gather(b"")
    if one.average is not None:
        kept, expected = load_file(Path(directory) / AVERAGE), one.average.state()
        found["average"] = {"apart": max(float((kept[key] - expected[key]).abs().max()) for key in expected)}
    found["continued"] = {"loss": several.train(uneven_groups(2, seed=9), 4).metrics["loss/total"]}
    return found


def _trained(name: str, ranks: Ranks | None) -> tuple[Learner, list[float]]:
    if ranks is None:
        learner = Learner(_spec(name), LoadedModel(ARCHITECTURES[name](), Path()))
    else:
        with stored(ARCHITECTURES[name](), ranks) as loaded:
            assert loaded is not None
            learner = Learner(_spec(name), loaded, ranks=ranks)
    return learner, [learner.train(uneven_groups(2, seed=step), step).metrics["loss/total"] for step in (1, 2, 3)]


def _spec(name: str) -> Any:
    return a_spec(
        model={"path": "/nowhere", "lora": LORA[name]},
        algorithm={"kl": {"placement": "loss"}, "old_log_probs": "recompute_at_version"},
        optimisation={
            "steps": 5,
            "groups_per_mini_batch": 2,
            "learning_rate": 1e-2,
            "epsilon": 1e-6,
            "average_decay": 0.5,
        },
    )


def test_two_ranks_with_adapters_learn_publish_and_keep_what_one_does(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()

    first, second = run_ranks(compared, str(folder))

    for name in NAMES:
        assert first[name]["losses"] < 1e-5, (name, first)
        assert first[name]["image"] < 1e-5, (name, first)
    assert first["average"]["apart"] < 1e-5
    name = NAMES[-1]
    alone = Learner(_spec(name), LoadedModel(ARCHITECTURES[name](), Path()))
    assert alone.adapters is not None
    alone.adapters.load(load_file(folder / MODEL / ADAPTER))
    alone.optimizer.load(load_file(folder / OPTIMIZER), updates=3)
    loss = alone.train(uneven_groups(2, seed=9), 4).metrics["loss/total"]
    assert abs(loss - first["continued"]["loss"]) < 1e-5
    assert first["continued"] == second["continued"]
