"""A teacher is shown the pictures of the prompts that it judges, as its own processor makes them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig

from flotilla.services.trainer.data.batch import make_batch
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.learning.memory import LearnerMemory
from flotilla.services.trainer.models.loading import LoadedModel, load_model
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError, ModelError
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.vision.processor import ImageProcessor
from tests.integration.trainer.test_images_agree import CPU, a_spec, answered, num_features
from tests.vision_models import IMAGE_TOKEN, KINDS, SPECIAL, WORDS, as_read, save_vision_model

PICTURED, BARE = "geometry", "sums"


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def groups(student: Path) -> list[Group]:
    found = answered(student)
    return [replace(g, task=replace(g.task, data_source=PICTURED if g.task.images else BARE)) for g in found]


@pytest.fixture(scope="module", params=KINDS[:2])  # the student is of grids
def teacher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("teacher"), request.param, seed=7, hidden=48)


def taught_by(student: Path, distillation: dict[str, Any], **images: Any) -> ExperimentSpec:
    written = a_spec(student).model_dump(mode="json", exclude_unset=True)
    written["data"] |= {"images": images, "data_source_column": "from"}
    return validate_spec(written | {"algorithm": {"distillation": distillation, "old_log_probs": "recompute"}})


def a_learner(spec: ExperimentSpec, *teachers: Path) -> Learner:
    student, *others = (load_model(path, dtype="float32", device=CPU) for path in (Path(spec.model.path), *teachers))
    return Learner(spec, student, None, others)


def judged(learner: Learner, groups: Sequence[Group]) -> torch.Tensor:
    batch = make_batch(groups, processor=learner.processor)
    found = learner._teacher_log_probs(batch)
    assert found is not None
    return found[batch.sequences.response_mask]


@torch.no_grad()
def by_transformers(path: Path, groups: Sequence[Group]) -> torch.Tensor:
    """Compute the log-probs of all sampled tokens by transformers' own forward, one sequence after the other."""
    model, processor = AutoModelForImageTextToText.from_pretrained(path).eval(), ImageProcessor.from_directory(path)
    found = []
    for group in groups:
        shown = [processor.process(image) for image in group.task.images]
        for each in group.trajectories:
            ids, sampled = torch.from_numpy(each.token_ids.astype(np.int64)), each.loss_mask.astype(bool)
            logits = model(input_ids=ids[None], **as_read(shown, ids)).logits[0]
            chosen = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            found.append(chosen[torch.from_numpy(sampled[1:])])
    return torch.cat(found)


def without_sampled_marks(groups: Sequence[Group]) -> list[Group]:
    """Leave answers out that have the token of an image, for which transformers would look for a picture."""
    kept = [[t for t in group.trajectories if IMAGE_TOKEN not in t.token_ids[t.loss_mask == 1]] for group in groups]
    return [replace(group, trajectories=tuple(each)) for group, each in zip(groups, kept, strict=True) if each]


def test_a_teacher_judges_what_it_sees(student: Path, teacher: Path, groups: list[Group]) -> None:
    shown = without_sampled_marks(groups)
    assert {group.task.data_source for group in shown} == {PICTURED, BARE}

    found = judged(a_learner(taught_by(student, {"path": str(teacher)}), teacher), shown)

    torch.testing.assert_close(found, by_transformers(teacher, shown), atol=1e-5, rtol=0)


def test_what_a_teacher_sees_teaches(student: Path, teacher: Path, groups: list[Group]) -> None:
    spec = taught_by(student, {"path": str(teacher), "pure": True})
    learner = a_learner(spec, teacher)

    kls = [learner.train(groups, step).metrics["distillation/kl"] for step in (1, 2)]

    assert kls[0] != 0 and kls[0] != kls[1]


def test_a_teacher_of_text_has_the_rows_without_pictures(student: Path, groups: list[Group], tmp_path: Path) -> None:
    text = a_text_model(tmp_path / "text", student)
    seeing = save_vision_model(tmp_path / "seeing", seed=7)
    both = [
        {"path": str(text), "data_sources": [BARE]},
        {"path": str(seeing), "data_sources": [PICTURED]},
    ]
    bare, shown = (without_sampled_marks([g for g in groups if bool(g.task.images) is has]) for has in (False, True))

    found = judged(a_learner(taught_by(student, {"teachers": both}), text, seeing), bare + shown)

    model = AutoModelForCausalLM.from_pretrained(text).eval()
    ids = torch.from_numpy(bare[0].trajectories[0].token_ids.astype(np.int64))
    num = int(bare[0].trajectories[0].loss_mask.sum())
    expected = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[-num:, 0]
    torch.testing.assert_close(found[:num], expected.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(found[-sum(_sampled(shown)) :], by_transformers(seeing, shown), atol=1e-5, rtol=0)
    alone = a_learner(taught_by(student, {"path": str(text)}), text)
    with pytest.raises(DataError, match=r"algorithm\.distillation\.path: the model takes no images"):
        judged(alone, groups)


def _sampled(groups: Sequence[Group]) -> list[int]:
    return [int(each.loss_mask.sum()) for group in groups for each in group.trajectories]


def a_text_model(folder: Path, tokenizer_of: Path) -> Path:
    """Write a model of text with the tokenizer of a vision-language model."""
    torch.manual_seed(3)
    sizes = {"vocab_size": len(SPECIAL) + len(WORDS), "hidden_size": 32, "intermediate_size": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer_of / name).read_bytes())
    return folder


def test_a_teacher_whose_processor_makes_other_tokens_is_refused(student: Path, tmp_path: Path) -> None:
    teacher = save_vision_model(tmp_path, seed=7)
    described = json.loads((teacher / "preprocessor_config.json").read_text())
    (teacher / "preprocessor_config.json").write_text(json.dumps(described | {"max_pixels": 2048}))
    taught = {"path": str(teacher)}

    with pytest.raises(ModelError, match=r"distillation\.path: its processor .*max_pixels 2048 there and 4096 here"):
        a_learner(taught_by(student, taught), teacher)

    a_learner(taught_by(student, taught, min_pixels=64, max_pixels=1024), teacher)


def test_a_trainer_that_gives_its_device_up_keeps_nothing_of_a_teachers_pictures(
    student: Path, teacher: Path, groups: list[Group], tmp_path: Path
) -> None:
    before = num_features()
    learner = a_learner(taught_by(student, {"path": str(teacher)}), teacher)
    judged(learner, groups)
    assert num_features() > before

    memory = LearnerMemory(learner, tmp_path)

    memory.offload()

    assert num_features() == before
    memory.reload()


def test_a_loaded_model_says_whether_it_takes_pictures(student: Path, tmp_path: Path) -> None:
    text = a_text_model(tmp_path, student)
    model = torch.nn.Linear(1, 1)

    assert [LoadedModel(model, path).takes_images for path in (student, text)] == [True, False]
