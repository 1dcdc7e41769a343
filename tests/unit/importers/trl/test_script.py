"""A script is followed without being run: constants, branches, its own functions, parsers of the command line."""

from pathlib import Path
from typing import Any

import pytest

from flotilla.importers.source import Given
from flotilla.importers.systems import read
from flotilla.importers.trl.written import Function, Rows
from flotilla.shared.errors import InvalidSpec

HEAD = """
import os
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
def fine(completions, **kwargs):
    return [1.0 for _ in completions]
"""
END = 'GRPOTrainer(model="m", reward_funcs=fine, args=args, train_dataset=load_dataset("owner/rows", split="train"))\n'


def given(text: str, *overrides: str, **environment: str) -> dict[str, Given]:
    found = read("trl", text, overrides, environment, source="folder/train.py")
    return {each.spelling: each for each in found}


def values(text: str, *overrides: str, **environment: str) -> dict[str, Any]:
    return {name: each.value for name, each in given(text, *overrides, **environment).items() if each.refusal is None}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("args = GRPOConfig(beta=0.25 * 2)", {"beta": 0.5}),
        ("RATE = 2e-6\nargs = GRPOConfig(learning_rate=RATE)", {"learning_rate": 2e-6}),
        ("more = dict(beta=0.1)\nmore['epsilon'] = 0.3\nargs = GRPOConfig(**more)", {"beta": 0.1, "epsilon": 0.3}),
        ("args = GRPOConfig()\nargs.temperature = 0.7", {"temperature": 0.7}),
        ("N = 'a/b'\nargs = GRPOConfig(output_dir=f\"out/{N.split('/')[-1]}-x\")", {"output_dir": "out/b-x"}),
        ("size = 4\nsize *= 2\nargs = GRPOConfig(num_generations=size)", {"num_generations": 8}),
        ("if 2 > 1:\n    args = GRPOConfig(beta=1)\nelse:\n    args = GRPOConfig(beta=2)", {"beta": 1}),
        ("def make(rate, beta=0.5):\n    return GRPOConfig(learning_rate=rate, beta=beta)\nargs = make(1e-5)",
         {"learning_rate": 1e-5, "beta": 0.5}),
        ("args = GRPOConfig(num_generations=int(os.environ.get('GROUP', '6')))", {"num_generations": 6}),
        ("args = GRPOConfig(bf16=True, fp16=not True)", {"bf16": True, "fp16": False}),
        ("with open('x') as file:\n    args = GRPOConfig(max_steps=3)", {"max_steps": 3}),
    ],
)  # fmt: skip
def test_values_that_are_known_before_a_run_are_followed(lines: str, expected: dict[str, Any]) -> None:
    found = values(f"{HEAD}{lines}\n{END}")

    assert {name: found[name] for name in expected} == expected


def test_the_body_of_main_is_followed_where_it_is_called() -> None:
    body = f"def main():\n    args = GRPOConfig(max_steps=7)\n    trainer = {END}    trainer.train()\n"

    assert values(f"{HEAD}{body}if __name__ == '__main__':\n    main()\n")["max_steps"] == 7


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    text = (
        f"{HEAD}open({str(marker)!r}, 'w')\nargs = GRPOConfig(max_steps=open({str(marker)!r}, 'w').write('x'))\n{END}"
    )

    found = given(text)["max_steps"]

    assert not marker.exists()
    assert found.refusal is not None and "only a run of the script knows" in found.refusal


def test_what_only_a_run_knows_is_asked_for_and_taken_from_the_command_line() -> None:
    text = f"{HEAD}import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--rate', type=float)\n"
    text += "parser.add_argument('--group-size', default=4)\noptions = parser.parse_args()\n"
    text += f"args = GRPOConfig(learning_rate=options.rate, num_generations=options.group_size)\n{END}"

    asked = given(text)
    assert (asked["num_generations"].value, asked["learning_rate"].refusal) == (
        4, "options.rate: it is an argument of the command line: give rate=VALUE"
    )  # fmt: skip
    assert values(text, "rate=1e-5", "group_size=2") | {"reward_funcs": 0, "train_dataset": 0} == {
        "trainer": "GRPOTrainer", "model": "m", "reward_funcs": 0, "learning_rate": 1e-5, "num_generations": 2,
        "train_dataset": 0,
    }  # fmt: skip


def test_parsers_of_trl_give_configurations_and_the_defaults_of_their_classes() -> None:
    text = f"{HEAD}from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config\n"
    text += "parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))\n"
    text += "script_args, args, model_args = parser.parse_args_and_config()\n"
    text += "GRPOTrainer(model=model_args.model_name_or_path, reward_funcs=fine, args=args, "
    text += "train_dataset=load_dataset(script_args.dataset_name)[script_args.dataset_train_split], "
    text += "peft_config=get_peft_config(model_args))\n"

    found = values(text, "model_name_or_path=owner/m", "dataset_name=owner/rows", "use_peft=true", "beta=0.1")

    assert (found["model"], found["beta"], found["lora_r"], found["lora_dropout"]) == ("owner/m", 0.1, 16, 0.05)
    assert found["train_dataset"].keywords == {"split": "train"}


def test_a_value_of_the_environment_that_may_be_a_secret_is_not_read() -> None:
    text = f"{HEAD}args = GRPOConfig(output_dir=os.environ['MY_TOKEN'])\n{END}"

    assert "hf_abc" not in repr(given(text, MY_TOKEN="hf_abc"))


def test_a_reward_function_takes_what_it_needs_of_the_script_and_no_more() -> None:
    text = HEAD.replace("1.0 for", "grade(_) for") + (
        "import re\nLIMIT = 3\nUNUSED = load_dataset('x')\nPATTERN = re.compile('a')\n"
        "def grade(text):\n    return float(len(PATTERN.findall(text)) > LIMIT)\n"
    )
    [function] = values(f"{text}args = GRPOConfig()\n{END}")["reward_funcs"]

    assert isinstance(function, Function) and function.why == ""
    assert "UNUSED" not in function.code and "trl" not in function.code
    names: dict[str, Any] = {}
    exec(compile(function.code.partition("\n\n")[2], "adapter", "exec"), names)
    assert names["function"](["aaaa", "b"]) == [1.0, 0.0]


def test_a_reward_function_that_needs_the_trainer_is_refused() -> None:
    text = f"{HEAD}args = GRPOConfig()\ndef odd(completions, **kwargs):\n    return [trainer.state.global_step]\n"
    [function] = values(f"{text}trainer = {END}".replace("=fine", "=odd"))["reward_funcs"]

    assert (function.code, function.why) == ("", "it needs GRPOConfig, which belongs to the trainer")


def test_rows_that_the_scripts_own_code_makes_become_source() -> None:
    text = f"{HEAD}from datasets import Dataset\nrows = Dataset.from_list([{{'prompt': 'a'}}])\n"
    text += "rows = rows.map(lambda row: {'prompt': row['prompt'] + '!'})\nargs = GRPOConfig()\n"
    found = values(text + END.replace('load_dataset("owner/rows", split="train")', "rows"))["train_dataset"]

    assert isinstance(found, Rows) and found.why == ""
    assert found.code.count("rows = ") == 3 and "GRPO" not in found.code


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\n", "must make one trainer of TRL's"),
        (f"{HEAD}args = GRPOConfig()\n{END}{END}", "GRPOTrainer in line 8, GRPOTrainer in line 9"),
        (f"{HEAD}args = GRPOConfig()\nfor seed in range(3):\n    {END}", "a loop makes trainers"),
        ("def broken(:\n", "it is no Python"),
        ("x = " + "(" * 3000, "it is no Python"),
    ],
)
def test_a_script_without_one_trainer_is_refused_with_what_it_has(text: str, expected: str) -> None:
    with pytest.raises(InvalidSpec, match=expected):
        given(text)


def test_arithmetic_of_a_hostile_script_stays_small() -> None:
    lines = ["a = 'x' * 90_000", *["a = a + a"] * 60, "b = 9 ** 9 ** 9", "c = f'{a}{a}'", "args = GRPOConfig(beta=b)"]

    found = given(HEAD + "\n".join(lines) + "\n" + END)["beta"]

    assert found.refusal is not None


@pytest.mark.parametrize("piece", ["[a, a]", "{'x': a, 'y': a}", "[a, a, fine]"])
def test_a_list_that_holds_another_many_times_is_refused_at_once(piece: str) -> None:
    lines = f"a = []\n{'a = ' + piece + chr(10)}" + f"a = {piece}\n" * 60

    found = given(f"{HEAD}{lines}args = GRPOConfig(vllm_server_host=a)\n{END}")

    assert "too large" in str(found["vllm_server_host"].refusal)


def test_a_list_that_holds_itself_is_no_known_value() -> None:
    found = given(f"{HEAD}a = []\na.append(a)\nargs = GRPOConfig(vllm_server_host=a)\n{END}")

    assert found["vllm_server_host"].refusal is not None
