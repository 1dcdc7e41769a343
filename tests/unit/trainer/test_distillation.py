"""A teacher's log-probs of the sampled tokens teach the student, beside the rewards or alone."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flotilla.services.trainer.algorithms.kl import exact_kl
from flotilla.services.trainer.checkpoint.manager import beginning, fill_alone, restored_from
from flotilla.services.trainer.data.batch import make_batch
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.learning.memory import LearnerMemory
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.replay.replay import TOLERANCE, replay
from flotilla.shared.checkpoints.folders import StoredCheckpoint
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError, ModelError
from flotilla.shared.schemas.trajectory import FinishReason, GradeStatus, Group, Trajectory
from flotilla.shared.streams.codec import decode_group, encode_body, encode_grades
from flotilla.shared.testing.builders import a_task
from tests.fleet import tiny_model
from tests.integration.trainer.architectures import ARCHITECTURES
from tests.unit.trainer.builders import VOCABULARY, a_model, a_spec, uneven_groups
from tests.unit.trainer.test_lora import a_state
from tests.unit.trainer.test_replay import STEPS, train

CPU = torch.device("cpu")
TEMPERATURE = 0.7


SERVERS = ({"url": "http://teacher.example.com:30000", "kind": "sglang"},)


def spec_of(*, model: dict[str, Any] | None = None, temperature: float = 1.0, **distillation: Any) -> ExperimentSpec:
    place = {} if "servers" in distillation else {"path": "/teacher"}
    by_source = {"data_source_column": "from"} if "teachers" in distillation else {}
    return a_spec(
        data=by_source,
        model=model or {},
        rollout={"sampling": {"temperature": temperature}},
        algorithm={"distillation": place | distillation},
        optimisation={"steps": 50, "groups_per_mini_batch": 2, "learning_rate": 1e-2},
    )


def a_teacher(seed: int = 1) -> nn.Module:
    """Make another model of the same vocabulary, wider than the student."""
    model = a_model(hidden_size=48, intermediate_size=64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2, generator=generator)
    return model


@torch.no_grad()
def naive_log_probs(model: nn.Module, trajectory: Trajectory, temperature: float = TEMPERATURE) -> list[float]:
    """Compute the log-prob of every sampled token, one forward pass of the whole text for each."""
    found, ids = [], torch.from_numpy(trajectory.token_ids).long()
    for place in np.flatnonzero(trajectory.loss_mask):
        logits = model(ids[None, :place]).logits[0, -1].float() / temperature
        found.append(float(torch.log_softmax(logits, -1)[ids[place]]))
    return found


@pytest.mark.parametrize("make", [a_teacher, ARCHITECTURES["GPT-2"]], ids=["wider", "another architecture"])
@pytest.mark.parametrize("pure", [False, True], ids=["beside rewards", "alone"])
def test_each_token_has_the_advantage_that_a_loop_over_tokens_gives_it(make: Any, pure: bool) -> None:
    groups, model = uneven_groups(2), make()
    spec = spec_of(coefficient=0.3, pure=pure, temperature=TEMPERATURE)
    without = spec.model_copy(update={"algorithm": spec.algorithm.model_copy(update={"distillation": None})})
    batch = make_batch(groups)
    of_rewards = Learner(without, LoadedModel(a_model(), Path()))._prepare(batch)[0].advantages
    mask = batch.sequences.response_mask
    sampled, judged = [], []
    for trajectory in (each for group in groups for each in group.trajectories):
        sampled += trajectory.log_probs[trajectory.loss_mask.astype(bool)].tolist()
        judged += naive_log_probs(model, trajectory)
    signal = torch.tensor(judged) - torch.tensor(sampled)

    learner = Learner(spec, LoadedModel(a_model(), Path()), None, [LoadedModel(model, Path())])
    prepared, found = learner._prepare(batch)
    metrics = found.metrics

    assert signal.abs().max() < 10, "no bound acts"
    expected = 0.3 * signal + (0.0 if pure else of_rewards[mask])
    torch.testing.assert_close(prepared.advantages[mask], expected, atol=2e-5, rtol=1e-5)
    assert not prepared.advantages[~mask].any()
    assert metrics["distillation_kl"].value == pytest.approx(float(-signal.mean()), abs=1e-5)
    assert metrics["advantage"].value == pytest.approx(float(expected.mean()), abs=1e-5)


@torch.no_grad()
def sample(student: nn.Module, generator: torch.Generator, groups: int = 4, size: int = 8, length: int = 8) -> Tensor:
    ids = torch.arange(1, groups + 1).repeat_interleave(size)[:, None]
    for _ in range(length):
        chances = torch.softmax(student(ids).logits[:, -1].float(), -1)
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], 1)
    return ids


@torch.no_grad()
def distributions(model: nn.Module, ids: Tensor) -> Tensor:
    return torch.log_softmax(model(ids).logits[:, :-1].float(), -1)


def grouped(student: nn.Module, ids: Tensor, size: int = 8) -> list[Group]:
    chosen = distributions(student, ids).gather(-1, ids[:, 1:, None]).squeeze(-1)
    made = [
        Trajectory(
            token_ids=tokens.numpy().astype(np.int32),
            loss_mask=np.array([0] + [1] * (len(tokens) - 1), np.uint8),
            log_probs=np.concatenate([[0.0], log_probs.numpy()]).astype(np.float32),
            versions=((0, 0),),
            finish_reason=FinishReason.STOP,
        ).graded(GradeStatus.SCORED, 0.0)
        for tokens, log_probs in zip(ids, chosen, strict=True)
    ]
    return [
        Group(a_task(number, group_size=size), tuple(made[number * size : (number + 1) * size]))
        for number in range(len(made) // size)
    ]


@pytest.mark.parametrize("size", [8, 1], ids=["groups", "groups of one"])
def test_a_student_comes_near_its_teacher_without_a_reward(size: int) -> None:
    spec = a_spec(
        rollout={"group_size": size},
        algorithm={"distillation": {"path": "/teacher", "pure": True}, "policy_loss": {"kind": "policy_gradient"}},
        optimisation={"steps": 80, "groups_per_mini_batch": 32 // size, "learning_rate": 1e-2},
    )
    student, teacher = a_model(), a_teacher()
    learner = Learner(spec, LoadedModel(student, Path()), None, [LoadedModel(teacher, Path())])
    before_teacher = {name: weight.clone() for name, weight in teacher.state_dict().items()}
    generator, exact, reported = torch.Generator().manual_seed(0), [], []

    for step in range(1, 61):
        ids = sample(student, generator)
        exact.append(float(exact_kl(distributions(student, ids), distributions(teacher, ids)).mean()))
        reported.append(learner.train(grouped(student, ids, size), step).metrics["distillation/kl"])

    first, last = np.mean(exact[:3]), np.mean(exact[-3:])
    assert last < 0.5 * first, (first, last)
    assert np.mean(reported[-3:]) == pytest.approx(last, rel=0.35)
    assert all(torch.equal(weight, before_teacher[name]) for name, weight in teacher.state_dict().items())


def copied(directory: Path) -> Path:
    """Copy the tiny model with other weights: a teacher with the student's tokenizer."""
    shutil.copytree(tiny_model(), directory)
    learner = beginning(a_spec(model={"path": str(tiny_model())}), CPU).learner
    model: Any = learner.loaded.model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    model.save_pretrained(directory)
    return directory


def test_a_restored_learner_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    teacher = str(copied(tmp_path / "teacher"))
    learner = beginning(spec_of(model={"path": str(tiny_model())}, path=teacher), CPU).learner
    learner.train(uneven_groups(2, seed=1), 1)
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    fill_alone(learner, folder)
    expected = learner.train(uneven_groups(2, seed=2), 2)

    stored = StoredCheckpoint(1, folder, a_state(learner.spec, 1))
    restored = restored_from(learner.spec, stored, CPU).learner
    found = restored.train(uneven_groups(2, seed=2), 2)

    assert found.metrics == expected.metrics
    assert expected.metrics["distillation/kl"] != 0
    theirs = restored.loaded.model.state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in learner.loaded.model.state_dict().items())


def test_a_step_is_computed_again_with_its_teacher(tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    a_teacher().save_pretrained(teacher)
    (teacher / "tokenizer_config.json").write_text("{}")
    train(tmp_path / "run", algorithm={"distillation": {"path": str(teacher), "coefficient": 0.5}})

    found = replay(tmp_path / "run", STEPS)

    assert not [each for each in found.figures if each.difference > TOLERANCE]
    assert any(each.name == "distillation/kl" and each.recorded != 0 for each in found.figures)


def judged_by(model: nn.Module, groups: list[Group]) -> list[Group]:
    """Write a model's log-probs onto samples, as a reward service does for a teacher behind a URL."""

    def judged(trajectory: Trajectory) -> Trajectory:
        values = np.zeros(len(trajectory.token_ids), np.float32)
        values[trajectory.loss_mask.astype(bool)] = naive_log_probs(model, trajectory, 1.0)
        return replace(trajectory, teacher_log_probs=values)

    return [replace(group, trajectories=tuple(map(judged, group.trajectories))) for group in groups]


@pytest.mark.parametrize("pure", [False, True], ids=["beside rewards", "alone"])
def test_log_probs_that_came_with_the_samples_teach_as_the_teacher_itself(pure: bool) -> None:
    teacher = a_teacher()
    inside = Learner(spec_of(pure=pure), LoadedModel(a_model(), Path()), None, [LoadedModel(teacher, Path())])
    outside = Learner(spec_of(pure=pure, servers=SERVERS), LoadedModel(a_model(), Path()))

    for step in range(1, 4):
        groups = uneven_groups(4, seed=step)
        expected = inside.train(groups, step)
        found = outside.train(judged_by(teacher, groups), step)

        assert expected.metrics["distillation/kl"] != 0
        for name, value in expected.metrics.items():
            assert found.metrics[name] == pytest.approx(value, abs=1e-5, rel=1e-5), (step, name)
    theirs = inside.loaded.model.state_dict()
    for name, weight in outside.loaded.model.state_dict().items():
        torch.testing.assert_close(weight, theirs[name], atol=1e-4, rtol=1e-4)


def test_what_a_teacher_said_travels_with_the_group_and_through_a_batch() -> None:
    (group,) = judged_by(a_teacher(), uneven_groups(1))

    came = decode_group(encode_body(group), encode_grades(group))
    batch = make_batch([came])

    for before, after in zip(group.trajectories, came.trajectories, strict=True):
        assert before.teacher_log_probs is not None
        assert after.teacher_log_probs is not None
        np.testing.assert_array_equal(before.teacher_log_probs, after.teacher_log_probs)
    spans = [t.teacher_log_probs[start:] for t, start in zip(came.trajectories, batch.span_starts, strict=True)]  # type: ignore[index]
    assert batch.teacher_log_probs is not None
    assert batch.teacher_log_probs.tolist() == np.concatenate(spans).tolist()
    assert batch.take(torch.tensor([2, 0]))[0].teacher_log_probs.tolist() == [*spans[2], *spans[0]]  # type: ignore[union-attr]
    ungraded = replace(came.trajectories[0], teacher_log_probs=None)
    assert make_batch([replace(came, trajectories=(ungraded, *came.trajectories[1:]))]).teacher_log_probs is None


def test_log_probs_of_a_teacher_are_finite_and_of_all_tokens() -> None:
    trajectory = uneven_groups(1)[0].trajectories[0]

    for values in (np.zeros(3, np.float32), np.full(len(trajectory.token_ids), np.nan, np.float32)):
        with pytest.raises(ValueError, match="teacher_log_probs must be"):
            replace(trajectory, teacher_log_probs=values)


def test_a_step_is_computed_again_without_the_teacher_behind_a_url(tmp_path: Path) -> None:
    judge = partial(judged_by, a_teacher())
    train(tmp_path, judge, algorithm={"distillation": {"servers": SERVERS, "coefficient": 0.5}})

    found = replay(tmp_path, STEPS)

    assert not [each for each in found.figures if each.difference > TOLERANCE]
    assert any(each.name == "distillation/kl" and each.recorded != 0 for each in found.figures)


def test_the_teacher_leaves_memory_with_the_student(tmp_path: Path) -> None:
    learner = Learner(spec_of(), LoadedModel(a_model(), Path()), None, [LoadedModel(a_teacher(), Path())])
    assert learner.teachers

    listed = {id(tensor) for tensor in LearnerMemory(learner, tmp_path)._tensors()}

    assert {id(tensor) for tensor in learner.teachers[0].model.parameters()} <= listed


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = copied(tmp_path / "teacher")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    (first, a), (second, b) = list(vocabulary.items())[20:22]
    vocabulary[first], vocabulary[second] = b, a
    path.write_text(json.dumps(tokenizer))

    with pytest.raises(ModelError, match=r"algorithm\.distillation\.path: the tokenizer of .* gives 2 tokens .* here"):
        beginning(spec_of(model={"path": str(tiny_model())}, path=str(folder)), CPU)


def test_a_teacher_that_reads_fewer_tokens_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    shutil.copytree(tiny_model(), folder)
    a_model().save_pretrained(folder)

    with pytest.raises(ModelError, match=f"reads {VOCABULARY} token ids and model.path writes"):
        beginning(spec_of(model={"path": str(tiny_model())}, path=str(folder)), CPU)


TEACHERS = [{"path": "/maths", "data_sources": ["maths", "physics"]}, {"path": "/law", "data_sources": ["law"]}]


def test_each_of_several_teachers_teaches_the_samples_of_its_data_sources() -> None:
    sources = ("maths", "law", "physics")
    groups = [
        replace(group, task=replace(group.task, data_source=source))
        for group, source in zip(uneven_groups(3), sources, strict=True)
    ]
    spec = spec_of(path=None, teachers=TEACHERS, pure=True, coefficient=0.5, temperature=TEMPERATURE)
    models = [a_teacher(1), a_teacher(2)]
    expected: list[float] = []
    for group, model in zip(groups, (models[0], models[1], models[0]), strict=True):
        for trajectory in group.trajectories:
            sampled = trajectory.log_probs[trajectory.loss_mask.astype(bool)]
            expected += (0.5 * (np.array(naive_log_probs(model, trajectory)) - sampled)).tolist()

    learner = Learner(spec, LoadedModel(a_model(), Path()), None, [LoadedModel(each, Path()) for each in models])
    batch = make_batch(groups)
    prepared, _ = learner._prepare(batch)

    found = prepared.advantages[batch.sequences.response_mask]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), atol=2e-5, rtol=1e-5)
    assert {id(tensor) for model in models for tensor in model.parameters()} <= {
        id(tensor) for tensor in LearnerMemory(learner, Path())._tensors()
    }


def test_a_sample_that_no_teacher_teaches_is_an_error_and_not_silence() -> None:
    spec = spec_of(path=None, teachers=TEACHERS, pure=True)
    learner = Learner(spec, LoadedModel(a_model(), Path()), None, [LoadedModel(a_teacher(), Path())] * 2)

    with pytest.raises(DataError, match="none teaches the data source None"):
        learner._prepare(make_batch(uneven_groups(2)))
