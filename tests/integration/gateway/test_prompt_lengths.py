"""Tokens are counted in processes that have no torch, and rows whose prompt is too long are left out."""

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from flotilla.services.gateway.datasets import lengths
from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.datasets.lengths import prompt_lengths
from flotilla.services.gateway.datasets.loading import load_training
from flotilla.services.gateway.datasets.overlong import kept_rows, without_overlong
from flotilla.services.gateway.preflight.prompts import look_at_prompts
from flotilla.services.rollout.episodes.rendering import ChatRenderer
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError, ModelError
from flotilla.shared.models.prompts import PromptTemplate
from flotilla.shared.schemas.task import Message
from tests.unit.gateway.builders import a_spec

TEMPLATE = (
    "{% for m in messages %}{{ raise_exception('no such role') if m.role == 'bad' }}"
    "<{{ m.role }}> {{ m.content }} {% endfor %}{% if extra %}<extra> {% endif %}<assistant>"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = Tokenizer(WordLevel({"<unk>": 0, "w": 1, "</s>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    directory = tmp_path_factory.mktemp("model")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="</s>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(directory)
    return directory


def prompt(num_words: int) -> list[Message]:
    return [Message("user", " ".join(["w"] * num_words))]


def a_filtered_spec(model: Path, **data: Any) -> ExperimentSpec:
    return a_spec(
        model={"path": str(model)},
        data={"path": "/nowhere", "max_prompt_tokens": 10, "overlong": {"kind": "filter", "workers": 1}} | data,
    )


def test_several_processes_count_what_the_rollouts_will_make(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "BATCH", 4)
    prompts = [prompt(n % 9) for n in range(30)]
    template = PromptTemplate(options={"extra": True})

    found = prompt_lengths(prompts, str(model), template, workers=2)

    renderer = ChatRenderer.from_directory(str(model), template)
    assert found == [len(renderer.prompt_ids(each)) for each in prompts]
    assert found[:3] == [3, 4, 5]


def test_long_counts_say_how_far_they_are(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lengths, "BATCH", 4)
    monkeypatch.setattr(lengths, "QUIET_SECONDS", 0.0)

    with caplog.at_level(logging.INFO):
        prompt_lengths([prompt(1)] * 12, str(model), PromptTemplate("{}"), workers=1)

    told = [record for record in caplog.records if record.message == "counting prompts' tokens"]
    assert told and {record.__dict__["prompts"] for record in told} == {12}


def test_rows_that_are_too_long_are_left_out_and_the_order_of_the_rest_stays(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("prompt,label\n" + "".join(f"{' '.join(['w'] * n)} x,{n}\n" for n in range(12)))
    spec = a_filtered_spec(model, path=str(path))

    filtered = [without_overlong(load_training(spec.data, seed=3), spec, "training") for _ in range(2)]

    assert (filtered[0].num_rows, filtered[0].num_dropped) == (12, 4), "<user> and <assistant> are two of the ten"
    assert [row["label"] for row in filtered[0].dataset.rows] == [str(n) for n in range(8)]
    orders = [[each.dataset.row_of(group_id) for group_id in range(24)] for each in filtered]
    assert orders[0] == orders[1] and sorted(orders[0][:8]) == list(range(8))


def test_a_dataset_that_is_too_long_as_a_whole_is_refused_with_the_count(model: Path) -> None:
    spec = a_filtered_spec(model, input_template="{}")
    dataset = Dataset([{"prompt": "w " * 20, "label": ""}] * 3, spec.data, 0)

    with pytest.raises(DataError, match=r"all 3 rows of the training dataset .* more than 10 tokens.* has 20"):
        without_overlong(dataset, spec, "training")


def test_each_source_keeps_its_place_or_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text("prompt,label\n" + "".join(f"{name}{n},1\n" for n in range(3)))
    sources = [{"path": str(tmp_path / f"{name}.csv"), "weight": 1} for name in "ab"]
    dataset = load_training(a_spec(data={"sources": sources, "shuffle": False}).data, seed=0)

    kept = kept_rows(dataset, [1, 9, 1, 9, 9, 1], 5, "training")

    assert [kept.rows[kept.row_of(group_id)]["prompt"] for group_id in range(6)] == ["a0", "b2", "a2", "b2", "a0", "b2"]
    with pytest.raises(DataError, match="all 3 rows of the training source 1 "):
        kept_rows(dataset, [1, 1, 1, 9, 9, 9], 5, "training")


def test_without_a_filter_nothing_is_counted() -> None:
    spec = a_spec()
    dataset = Dataset([{"prompt": "p", "label": ""}], spec.data, 0)

    assert without_overlong(dataset, spec, "training").dataset is dataset


def test_what_goes_wrong_is_said(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer can be loaded from"):
        prompt_lengths([prompt(1)], str(tmp_path), PromptTemplate(), workers=1)
    with pytest.raises(DataError, match=r"refuses the prompt of row 1: .*no such role"):
        prompt_lengths([prompt(1), [Message("bad", "x")]], str(model), PromptTemplate(), workers=1)
    stop = threading.Event()
    stop.set()
    with pytest.raises(DataError, match="was stopped"):
        prompt_lengths([prompt(1)], str(model), PromptTemplate(), workers=1, stop=stop)


def test_a_check_renders_the_first_prompts_as_the_rollouts_do(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "w w"}, {"prompt": " ".join("w" * 20)}]
    spec = a_filtered_spec(model)

    found = look_at_prompts(spec, [Dataset(rows, spec.data, seed=0)])

    # Words of this tokenizer are all unknown but w.
    assert (found.num_prompts, found.shortest, found.longest, found.limit, found.num_too_long) == (2, 4, 22, 10, 1)
    assert (found.rendered_by, found.first) == ("the tokenizer's chat template", "<unk> w w <unk>")


def test_a_check_shows_the_first_prompt_of_an_episode_and_the_models_own_context(model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(model, own)
    (own / "config.json").write_text('{"text_config": {"max_position_embeddings": 512}}')
    spec = a_filtered_spec(own)
    begun = [Message("user", "w w w w")]

    found = look_at_prompts(spec, [Dataset([{"prompt": "w w"}], spec.data, seed=0)], [tuple(begun)])

    assert (found.num_prompts, found.shortest, found.longest) == (2, 4, 6)
    assert (found.first, found.own_context) == ("<unk> w w w w <unk>", 512)


def test_a_check_says_what_a_tokenizer_without_a_template_and_one_that_refuses_do(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "chat_template.jinja").unlink()
    spec = a_filtered_spec(bare)

    found = look_at_prompts(spec, [Dataset([{"prompt": "w w"}], spec.data, seed=0)])

    assert found.rendered_by.startswith("nothing: the tokenizer has no chat template")
    assert found.first == "w w"
    refused = Dataset([{"prompt": [{"role": "user", "content": "w"}]}, {"prompt": [{"role": "bad", "content": "w"}]}],
                      spec.data, seed=0)  # fmt: skip
    with pytest.raises(DataError, match=r"refuses the prompt of row 1: .*no such role"):
        look_at_prompts(a_filtered_spec(model), [refused])
