"""Which learner an experiment's job needs, and the models that it has beside the policy: a teacher, and a critic."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from transformers import AutoTokenizer

from flotilla.services.trainer.learning.finished import (
    FinishedLearner,
    PreferenceLearner,
    RewardModelLearner,
    SupervisedLearner,
)
from flotilla.services.trainer.learning.labelled import KtoLearner
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.learning.profiling import TraceWriter, profiling
from flotilla.services.trainer.learning.trainable import CRITIC
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.parallel.ranks import ONE_RANK, Ranks
from flotilla.shared.config.spec import ExperimentSpec, other_models
from flotilla.shared.errors import ModelError
from flotilla.shared.models.hub import model_directory

LEARNERS: dict[str, type[FinishedLearner]] = {
    "sft": SupervisedLearner,
    "preference": PreferenceLearner,
    "kto": KtoLearner,
    "reward_model": RewardModelLearner,
}


def make_learner(
    spec: ExperimentSpec,
    loaded: LoadedModel,
    reference: LoadedModel | None = None,
    teachers: Sequence[LoadedModel] = (),
    critic: LoadedModel | None = None,
    *,
    ranks: Ranks = ONE_RANK,
) -> Learner:
    """Make the learner of an experiment; see ``Learner``."""
    learner = LEARNERS.get(spec.job.kind, Learner)(spec, loaded, reference, teachers, critic, ranks=ranks)
    if spec.parallelism.offload.reference and learner.reference is not None:
        learner.reference.park()
    learner.around_step = partial(profiling, learner, TraceWriter())
    return learner


class Load(Protocol):
    """Loads a model as all of a job's are loaded; see ``load_model``."""

    def __call__(self, path: Path, *, dtype: str, scores: bool = False) -> LoadedModel:
        """Load one."""


def load_teachers(spec: ExperimentSpec, student: LoadedModel, load: Load) -> list[LoadedModel]:
    """Load the teachers of a student, in their order; none where they are behind URLs, or there are none.

    Raises:
        ModelError: one cannot be loaded, or its token ids mean something else than the student's.
    """
    found = []
    for field, model in other_models(spec).items():
        if field != CRITIC:
            found.append(load(model_directory(model), dtype=model.dtype))
            check_vocabulary(field, found[-1], student)
    return found


def load_critic(spec: ExperimentSpec, policy: LoadedModel, load: Load) -> LoadedModel | None:
    """Load what the critic begins as; None where that is a copy of the policy.

    Of a policy whose weights are packed it cannot be one, since all of its own train: they are loaded once more, whole.

    Raises:
        ModelError: it cannot be loaded, is of another architecture than the policy, whose packed rows it reads, or its
            token ids mean something else.
    """
    config = spec.algorithm.resolved_value_loss.model
    if config is None and spec.model.quantisation is not None:
        config = spec.model
    if config is None:
        return None
    source = model_directory(config)
    critic = load(source, dtype=spec.model.dtype, scores=_is_classifier(source))
    kinds = [str(getattr(each.model.config, "model_type", None)) for each in (critic, policy)]
    if kinds[0] != kinds[1]:
        raise ModelError(f"{CRITIC}: {source} is a {kinds[0]}, and model.path a {kinds[1]}: name one of the same kind")
    check_vocabulary(CRITIC, critic, policy)
    return critic


def _is_classifier(directory: Path) -> bool:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # what is wrong with it is said where it is loaded
    return any(str(name).endswith("ForSequenceClassification") for name in config.get("architectures") or ())


def check_vocabulary(field: str, model: LoadedModel, policy: LoadedModel) -> None:
    """Check that a model reads every token id of the policy's as the same token.

    Raises:
        ModelError: it does not; one sentence names the field, and the first token that differs.
    """
    if model.vocabulary < policy.vocabulary:
        raise ModelError(
            f"{field}: {model.source} reads {model.vocabulary} token ids and model.path writes "
            f"{policy.vocabulary}: name a model of the same family"
        )
    theirs, own = (
        AutoTokenizer.from_pretrained(each.source, local_files_only=True).get_vocab() for each in (model, policy)
    )
    differing = [(number, token) for token, number in own.items() if theirs.get(token) != number]
    if differing:
        number, token = min(differing)
        raise ModelError(
            f"{field}: the tokenizer of {model.source} gives {len(differing)} tokens of model.path's another id, or "
            f"none, such as {token!r} (there {number}, here {theirs.get(token)}): name one with the same tokenizer"
        )
