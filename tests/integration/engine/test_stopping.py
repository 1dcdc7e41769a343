"""What ends a completion: end-of-sequence tokens, stop tokens, stop strings, the length, and broken weights."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.services.rollout.engines.embedded.outcomes import GenerationFailed
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import InvalidRequest, ModelError
from flotilla.shared.schemas.trajectory import FinishReason
from tests.contract.engine.models import VOCAB, make_model, save_image
from tests.contract.engine.requests import a_request
from tests.integration.engine.conftest import SavedModel
from tests.integration.engine.running import answer, outcomes, steps

Saved = Callable[[str], SavedModel]


@pytest.fixture
def worded(saved: Saved, tmp_path: Path) -> Path:
    """A model whose token 17 is the word ``w17``; words are separated by blanks."""
    path = tmp_path / "worded"
    copytree(saved("qwen3").path, path)
    Tokenizer(WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0")).save(
        str(path / "tokenizer.json")
    )
    return path


def test_the_models_own_end_ends_unless_ignored(saved: Saved, tmp_path: Path) -> None:
    [free] = answer(saved("qwen3").engine(), a_request(max_new_tokens=12))
    end = int(free.token_ids[5])
    path = tmp_path / "model"
    copytree(saved("qwen3").path, path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [95, end]}))
    engine = TorchEngine(EngineSettings(str(path), slots=4, context_tokens=64))

    [ended] = answer(engine, a_request(max_new_tokens=12, ignore_eos=False))
    [ignored] = answer(engine, a_request(max_new_tokens=12, ignore_eos=True))

    first = free.token_ids.tolist().index(end)
    assert ended.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    assert ended.finish_reason is FinishReason.STOP
    assert ignored.token_ids.tolist() == free.token_ids.tolist()
    assert ignored.finish_reason is FinishReason.LENGTH


def test_a_stop_string_over_two_tokens_ends_a_completion(worded: Path) -> None:
    engine = TorchEngine(EngineSettings(str(worded), slots=4, context_tokens=64))
    [free] = answer(engine, a_request(max_new_tokens=12))
    words = [f"w{token}" for token in free.token_ids.tolist()]

    [stopped, other] = answer(
        engine, a_request(seeds=(1, 2), max_new_tokens=12, stop=("nothing", f"{words[6]} {words[7]}"))
    )

    assert stopped.token_ids.tolist() == free.token_ids[:8].tolist()
    assert stopped.finish_reason is FinishReason.STOP
    assert other.finish_reason is FinishReason.LENGTH


def test_a_stop_string_without_a_tokenizer_is_refused(saved: Saved) -> None:
    with pytest.raises(InvalidRequest, match="tokenizer"):
        saved("qwen3").engine().submit(a_request(stop=("end",)))


def test_stopped_on_the_last_token_counts_as_stopped(saved: Saved) -> None:
    [free] = answer(saved("qwen3").engine(), a_request(max_new_tokens=3))
    last = int(free.token_ids[-1])
    assert last not in free.token_ids[:-1]

    [stopped] = answer(saved("qwen3").engine(), a_request(max_new_tokens=3, stop_token_ids=(last,)))

    assert stopped.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "mamba"])
def test_weights_that_give_no_numbers_fail_the_request_and_nothing_else(
    saved: Saved, tmp_path: Path, family: str
) -> None:
    engine = saved(family).engine(slots=4)
    good = save_image(saved(family).model, tmp_path / "good.safetensors")
    broken = make_model(family)
    next(iter(broken.parameters())).fill_(torch.nan)
    [before] = answer(engine, a_request(max_new_tokens=4))
    engine.submit(a_request(seeds=(1, 2), max_new_tokens=30))
    steps(engine, 4)
    engine.request_update(1, save_image(broken, tmp_path / "broken.safetensors"), 7, OnWeightUpdate.INTERRUPT)

    errors = [outcome.error for outcome in outcomes(engine) if isinstance(outcome, GenerationFailed)]

    assert [type(error) for error in errors] == [ModelError]
    assert "not finite under policy version 7" in errors[0].detail
    assert engine.load().running == 0
    engine.request_update(2, good, 8, OnWeightUpdate.DRAIN)
    [after] = answer(engine, a_request(max_new_tokens=4))
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert after.versions == ((0, 8),)
