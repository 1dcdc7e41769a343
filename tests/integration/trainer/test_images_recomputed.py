"""Pictures in prompts of Qwen3.5, whose layers keep no keys: the engine recomputes, and the trainer does not pack."""

from pathlib import Path

import pytest
import torch

from flotilla.services.rollout.engines.base import GenerationRequest, SamplingParameters
from flotilla.services.rollout.engines.decoders.illustrated import RecomputingVisionDecoder
from flotilla.services.rollout.episodes.rendering import ChatRenderer
from flotilla.services.trainer.data.batch import make_batch
from flotilla.services.trainer.data.micro_batch import RowRules, make_micro_batches
from flotilla.services.trainer.learning.learner import Learner
from flotilla.shared.schemas.task import Message
from flotilla.shared.schemas.trajectory import Group
from tests.integration.trainer.test_images_agree import (
    CPU,
    NEW_TOKENS,
    PROMPTS,
    a_learner,
    a_spec,
    an_engine,
    answered,
    folder_kind,
    sampled,
    test_sampled_tokens_have_the_log_probs_of_transformers_own_forward,  # noqa: F401  of this folder, too
    test_the_tower_trains_where_the_spec_says_so,  # noqa: F401
)
from tests.vision_models import save_vision_model


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("model"), request.param)


def log_probs_of(learner: Learner, groups: list[Group]) -> torch.Tensor:
    batch = make_batch(groups, processor=learner.processor)
    found = torch.zeros_like(batch.rollout_log_probs)
    rows = RowRules("padded")
    for micro in make_micro_batches(batch, range(batch.num_sequences), rows, max_tokens=200, device=CPU):
        with torch.no_grad():
            found[micro.tokens] = micro.spread(learner.policy.statistics(micro.inputs, with_entropy=False).log_probs)
    return found


def test_the_engine_keeps_no_keys(folder: Path) -> None:
    assert isinstance(an_engine(folder)._decoder, RecomputingVisionDecoder)


def test_rows_are_padded(folder: Path) -> None:
    assert not a_learner(folder).policy.can_pack


def test_a_sample_that_ends_before_others_leaves_them_as_they_are(folder: Path) -> None:
    renderer = ChatRenderer.from_directory(str(folder), images=a_spec(folder).data.images)
    ids, placed = renderer.illustrated([Message("user", "which <image> colour ?", PROMPTS[1][:1])])
    long, short = (SamplingParameters(num, ignore_eos=True) for num in (NEW_TOKENS, 2))
    requests = [
        GenerationRequest("short", ids, (1,), short, images=placed),
        GenerationRequest("long", ids, tuple(range(2, 9)), long, images=placed),
    ]

    _, together = sampled(an_engine(folder), requests)

    (alone,) = sampled(an_engine(folder), requests[1:])
    assert [each.token_ids.tolist() for each in together] == [each.token_ids.tolist() for each in alone]


def test_the_trainer_gives_sampled_tokens_the_engines_log_probs(folder: Path) -> None:
    groups, learner = answered(folder), a_learner(folder)

    expected = make_batch(groups, processor=learner.processor).rollout_log_probs

    torch.testing.assert_close(log_probs_of(learner, groups), expected, atol=1e-5, rtol=0)


def test_samples_that_go_on_under_new_weights_see_their_pictures(folder: Path, tmp_path: Path) -> None:
    other = save_vision_model(tmp_path / "other", folder_kind(folder), seed=1)
    learners = [a_learner(folder), a_learner(other)]
    groups = answered(folder, other / "model.safetensors")
    batch = make_batch(groups, processor=learners[0].processor)
    assert set(batch.versions.tolist()) == {0, 1}

    old, new = (log_probs_of(each, groups) for each in learners)

    expected = torch.where(batch.versions == 1, new, old)
    torch.testing.assert_close(batch.rollout_log_probs, expected, atol=1e-5, rtol=0)
