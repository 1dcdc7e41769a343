import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flotilla.services.gateway.datasets.columns import value_at
from flotilla.services.reward.verifiers.verl import score_dapo, score_gsm8k, score_math, score_search
from flotilla.trial_run.made_rows import FORMS, RIGHT, image
from tests.unit.trial_run.recipes import imported, trial_of


def rows(name: str, file: str, tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trial_of(name, tmp_path).files[file].splitlines()]


@pytest.mark.parametrize("score", [score_gsm8k, score_math, score_dapo])
def test_half_of_the_expected_answers_are_right(score: Any) -> None:
    results = {score(form.format(each), "1").is_correct for form in FORMS for each in RIGHT}

    assert results == {True, False}


def test_a_search_label_is_what_its_scorer_reads() -> None:
    assert score_search("<answer>1</answer>", json.dumps({"target": ["1"]})).is_correct


def test_rows_have_the_columns_that_the_file_names(tmp_path: Path) -> None:
    (first, *others) = rows("openrlhf_dpo.sh", "rows-0.jsonl", tmp_path)
    found = imported("openrlhf_reinforce.sh").spec
    assert found is not None
    plain = rows("openrlhf_reinforce.sh", "rows.jsonl", tmp_path)[0]

    assert len(others) == 7
    assert {"chosen", "rejected"} <= first.keys()
    assert first["chosen"] != first["rejected"]
    assert plain[found.data.prompt_column] and plain["answer"] in RIGHT


def test_rows_of_verl_are_structures_with_messages(tmp_path: Path) -> None:
    row = rows("verl_grpo.sh", "rows.jsonl", tmp_path)[0]

    assert value_at(row, "reward_model.ground_truth") in RIGHT
    assert row["data_source"] == "openai/gsm8k"
    assert row["prompt"][0]["role"] == "user"


def test_an_image_is_a_picture_where_the_prompt_has_its_mark(tmp_path: Path) -> None:
    row = rows("verl_images.sh", "rows.jsonl", tmp_path)[0]

    assert row["prompt"][0]["content"].count("<image>") == len(row["images"]) == 1
    picture = Image.open(io.BytesIO(base64.b64decode(image(1).partition(",")[2])))
    assert picture.size == (16, 16)
    assert picture.convert("RGB").getpixel((3, 3)) == (53, 101, 197)


def test_rows_that_the_import_writes_stay_the_first_of_each_environment(tmp_path: Path) -> None:
    found = rows("roll_agentic.yaml", "rows.jsonl", tmp_path)

    assert len(found) == 8
    assert {row["tag"] for row in found} == {"FrozenLake"}
