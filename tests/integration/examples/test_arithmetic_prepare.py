"""The preparation as its user meets it: a directory that is complete or absent, and a model that starts weak."""

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.arithmetic.building import measure
from examples.arithmetic.kept import has
from examples.arithmetic.problems import heldout_set
from examples.arithmetic.settings import Settings, settings_of
from examples.preparing import Progress, is_prepared, prepare

BUILDING = "examples.arithmetic.building"
PROGRAM = Path(__file__).parents[3] / "examples" / "arithmetic" / "prepare.py"


def hasty(seed: int = 0) -> Settings:
    """Settings whose preparation takes a second and teaches nothing."""
    standard = settings_of("standard", seed)
    warm_start = replace(standard.warm_start, max_steps=4, settle_steps=2, max_weak_steps=4)
    return replace(standard, warm_start=warm_start, num_train=600, num_heldout=32)


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def call(*arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")


def test_the_directory_holds_a_model_and_rows_that_load(tmp_path: Path) -> None:
    prepare(tmp_path / "made", hasty(), Progress(), BUILDING)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made" / "model")
    training, heldout = rows(tmp_path / "made" / "train.jsonl"), rows(tmp_path / "made" / "heldout.jsonl")
    turn = [{"role": "user", "content": training[0]["prompt"]}]
    ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generate(**ids, max_new_tokens=2).shape[1] > ids["input_ids"].shape[1]
    assert (len(training), len(heldout)) == (600, 32)
    assert all(str(eval(row["chain"])) == row["answer"] for row in training + heldout)
    assert not {row["chain"] for row in training} & {row["chain"] for row in heldout}
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_the_kept_model_is_taken_without_torch_and_is_as_right_as_it_says(tmp_path: Path) -> None:
    calling = call("--output", tmp_path / "made")

    said, errors = calling.communicate(timeout=100)

    assert calling.returncode == 0, errors
    assert "kept in" in said
    assert "loading torch" not in said
    settings = settings_of("standard", 0)
    assert is_prepared(tmp_path / "made", settings)
    heldout = heldout_set(settings.num_heldout, settings.problems, random.Random(0))
    assert len(rows(tmp_path / "made" / "train.jsonl")) == settings.num_train
    started = json.loads((tmp_path / "made" / "prepared.json").read_text())["start"]["greedy"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made" / "model")
    found = measure(model, tokenizer, heldout, max_new_tokens=settings.max_new_tokens, is_greedy=True, report=print)
    assert found.right == pytest.approx(started["right"], abs=0.1)


@pytest.mark.parametrize("settings", [settings_of("standard", 1), settings_of("hard", 0), hasty()])
def test_what_is_kept_is_not_taken_for_other_settings(settings: Settings) -> None:
    assert has(settings_of("standard", 0))
    assert not has(settings)


def test_a_second_call_finds_all_prepared_and_other_settings_are_refused(tmp_path: Path) -> None:
    prepare(tmp_path / "made", hasty(), Progress(), BUILDING)

    assert is_prepared(tmp_path / "made", hasty())
    with pytest.raises(FileExistsError, match="other settings"):
        is_prepared(tmp_path / "made", hasty(seed=1))


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")

    calling = call("--output", tmp_path)

    _, errors = calling.communicate(timeout=60)
    assert calling.returncode == 2
    assert "was not made by this program" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_call_leaves_nothing_behind(tmp_path: Path, number: signal.Signals, code: int) -> None:
    calling = call("--make", "--output", tmp_path / "made")
    assert calling.stdout is not None
    while "tokenizer of" not in calling.stdout.readline():
        assert calling.poll() is None
    assert any(tmp_path.iterdir())

    os.kill(calling.pid, number)

    calling.communicate(timeout=60)
    assert calling.returncode == code
    assert not any(tmp_path.iterdir())
