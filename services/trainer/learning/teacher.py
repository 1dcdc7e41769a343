"""The teacher of on-policy distillation: a model that is never trained and judges what the student sampled."""

from dataclasses import replace

import torch
from torch import Tensor
from transformers import AutoTokenizer

from services.trainer.algorithms.advantages import Advantages
from services.trainer.algorithms.advantages.distillation import distil
from services.trainer.algorithms.metrics import mean_over
from services.trainer.algorithms.sequences import PackedSequences
from services.trainer.models.loading import LoadedModel, load_model
from shared.config.distillation import DistillationConfig
from shared.errors import ModelError
from shared.model_hub import model_directory


def load_teacher(config: DistillationConfig, student: LoadedModel, device: torch.device) -> LoadedModel:
    """Load the teacher of a student.

    Raises:
        ModelError: it cannot be loaded, or its token ids mean something else than the student's.
    """
    teacher = load_model(model_directory(config.model), dtype=config.dtype, device=device)
    check_vocabulary(teacher, student)
    return teacher


def check_vocabulary(teacher: LoadedModel, student: LoadedModel) -> None:
    """Check that the teacher reads every token id of the student's as the same token.

    Raises:
        ModelError: it does not; one sentence names the first that differs.
    """
    field = "algorithm.distillation.path"
    if teacher.vocabulary < student.vocabulary:
        raise ModelError(
            f"{field}: {teacher.source} reads {teacher.vocabulary} token ids and model.path writes "
            f"{student.vocabulary}: name a teacher of the same family"
        )
    theirs, own = (
        AutoTokenizer.from_pretrained(each.source, local_files_only=True).get_vocab() for each in (teacher, student)
    )
    differing = [(number, token) for token, number in own.items() if theirs.get(token) != number]
    if differing:
        number, token = min(differing)
        raise ModelError(
            f"{field}: the tokenizer of {teacher.source} gives {len(differing)} tokens of model.path's another id, or "
            f"none, such as {token!r} (there {number}, here {theirs.get(token)}): name one with the same tokenizer"
        )


def taught(
    found: Advantages, config: DistillationConfig, sampled: Tensor, teacher: Tensor, sequences: PackedSequences
) -> Advantages:
    """Add the teacher's part to advantages, or put it in their place.

    Args:
        found: of the rewards.
        config: the section.
        sampled: [T] nats of the old policy, the sampler's own by default.
        teacher: [T] nats.
        sequences: which tokens count.
    """
    advantages = distil(found.advantages, sampled, teacher, sequences, coefficient=config.coefficient, pure=config.pure)
    mask = sequences.response_mask
    metrics = found.metrics | {
        "advantage": mean_over(advantages, mask),
        "advantage_squared": mean_over(advantages.square(), mask),
        "distillation_kl": mean_over(sampled - teacher, mask),
    }
    return replace(found, advantages=advantages, metrics=metrics)
