"""Which learner an experiment's job needs."""

from flotilla.services.trainer.learning.finished import (
    FinishedLearner,
    PreferenceLearner,
    RewardModelLearner,
    SupervisedLearner,
)
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.parallel.ranks import ONE_RANK, Ranks
from flotilla.shared.config.spec import ExperimentSpec

LEARNERS: dict[str, type[FinishedLearner]] = {
    "sft": SupervisedLearner,
    "preference": PreferenceLearner,
    "reward_model": RewardModelLearner,
}


def make_learner(
    spec: ExperimentSpec,
    loaded: LoadedModel,
    reference: LoadedModel | None = None,
    teacher: LoadedModel | None = None,
    critic: LoadedModel | None = None,
    *,
    ranks: Ranks = ONE_RANK,
) -> Learner:
    """Make the learner of an experiment; see ``Learner``."""
    learner = LEARNERS.get(spec.job.kind, Learner)(spec, loaded, reference, teacher, critic, ranks=ranks)
    if spec.parallelism.offload.reference and learner.reference is not None:
        learner.reference.park()
    return learner
