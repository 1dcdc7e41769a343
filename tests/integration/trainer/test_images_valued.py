"""Pictures that a critic values: it computes them as transformers' own forward does, and learns from them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from flotilla.services.trainer.data.batch import make_batch
from flotilla.services.trainer.data.micro_batch import make_micro_batches
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.learning.memory import LearnerMemory
from flotilla.services.trainer.models.loading import load_model
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.errors import ModelError
from tests.integration.trainer.test_images_agree import CPU, LAYOUTS, a_spec, answered, num_features
from tests.vision_models import IMAGE_TOKEN, KINDS, as_read, is_of_tower, save_vision_model


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("model"), request.param)


def a_learner(folder: Path, *, tower: str = "frozen", own: Path | None = None) -> Learner:
    written = a_spec(folder, vision_tower=tower).model_dump(mode="json", exclude_unset=True)
    value_loss = {} if own is None else {"path": str(own)}
    spec = validate_spec(written | {"algorithm": {"advantage": {"kind": "gae"}, "value_loss": value_loss}})
    policy, *critic = (load_model(path, dtype="float32", device=CPU) for path in (folder, own) if path is not None)
    return Learner(spec, policy, None, (), *critic)


@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_a_critic_values_pictures_as_transformers_own_forward_has_them(folder: Path, tower: str) -> None:
    learner, groups = a_learner(folder, tower=tower), answered(folder)
    critic, processor = learner.critic, learner.processor
    assert critic is not None and processor is not None
    before = {name: each.clone() for name, each in critic.body.named_parameters()}

    for step in (1, 2):  # a head of zeros values nothing, and teaches no body
        learner.train(groups, step)

    moved = {name for name, each in critic.body.named_parameters() if not torch.equal(each, before[name])}
    assert any("language_model" in name for name in moved)
    assert any(map(is_of_tower, moved)) is (tower == "trained")
    batch = make_batch(groups, processor=processor)
    found = []
    for rows in LAYOUTS.values():
        micros = make_micro_batches(batch, range(batch.num_sequences), rows, max_tokens=8192, device=CPU)
        found.append(critic.evaluate(batch.rollout_log_probs, micros)[batch.sequences.response_mask])
        torch.testing.assert_close(found[-1], found[0], atol=1e-5, rtol=0)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    model.model.load_state_dict(critic.body.state_dict())
    checked, rest = 0, found[0]
    for group in groups:
        shown = [processor.process(image) for image in group.task.images]
        for each in group.trajectories:
            is_sampled = torch.from_numpy(each.loss_mask.astype(bool))
            ours, rest = rest[: int(is_sampled.sum())], rest[int(is_sampled.sum()) :]
            ids = torch.from_numpy(each.token_ids.astype(np.int64))
            if not shown or IMAGE_TOKEN in ids[is_sampled]:
                continue  # It would look for a picture there.
            with torch.no_grad():
                hidden = model.model(input_ids=ids[None], **as_read(shown, ids)).last_hidden_state[0]
                expected = critic._head(hidden[:-1][is_sampled[1:]]).squeeze(-1)
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
            checked += 1
    assert checked >= 3 and float(found[0].abs().max()) > 1e-3


def test_a_critic_that_gives_its_device_up_keeps_nothing_of_pictures(folder: Path, tmp_path: Path) -> None:
    learner, memory_before = a_learner(folder), num_features()
    learner.train(answered(folder)[:1], 1)
    assert num_features() > memory_before + 1

    memory = LearnerMemory(learner, tmp_path)
    memory.offload()

    assert num_features() == memory_before
    memory.reload()


def test_a_critic_of_its_own_whose_processor_gives_images_other_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    kind = AutoModelForImageTextToText.from_pretrained(folder).config.model_type
    coarser = save_vision_model(tmp_path / "coarser", kind, patch=8)

    with pytest.raises(ModelError, match=r"algorithm\.value_loss\.path: its processor gives images other tokens"):
        a_learner(folder, own=coarser)
