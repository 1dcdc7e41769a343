"""A launch file is a spec and what must be made first."""

from pathlib import Path

import pytest
import yaml

from flotilla.launch_file import read_launch_file
from flotilla.shared.errors import InvalidSpec

SPEC = """
name: trial
seed: 3
model: {path: "made/{seed}/model"}
data: {path: "made/{seed}/train.jsonl"}
reward: {components: [{kind: custom, path: "grade.py:score"}]}
optimisation: {steps: 5}
"""


def written(directory: Path, text: str) -> Path:
    path = directory / "spec.yaml"
    path.write_text(text)
    return path


def test_the_seed_stands_wherever_it_is_named(tmp_path: Path) -> None:
    launch = read_launch_file(written(tmp_path, SPEC), ["seed=8"])

    assert launch.spec.model.path == str(tmp_path / "made/8/model")
    assert launch.spec.seed == 8


def test_prepare_is_the_command_lines_business_and_never_sent(tmp_path: Path) -> None:
    prepare = 'prepare: {command: [python, make.py, "--seed", "{seed}"], output: "made/{seed}"}'
    launch = read_launch_file(written(tmp_path, SPEC + prepare))

    assert launch.prepare is not None
    assert launch.prepare.command == ("python", "make.py", "--seed", "3")
    assert "prepare" not in launch.document


def test_a_wrong_prepare_section_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="command"):
        read_launch_file(written(tmp_path, SPEC + "prepare: {output: made}"))


@pytest.mark.parametrize(
    ("prepare", "path"),
    [("3", "prepare"), ("{output: made}", "prepare.command"), ("{command: [a], output: x, z: 1}", "prepare.z")],
)
def test_what_is_wrong_with_prepare_is_said_with_its_place(prepare: str, path: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec) as caught:
        read_launch_file(written(tmp_path, f"{SPEC}prepare: {prepare}"))

    assert [entry["path"] for entry in caught.value.errors] == [path]


def test_a_home_of_nobody_is_a_name_like_any_other(tmp_path: Path) -> None:
    launch = read_launch_file(written(tmp_path, SPEC), ["data.path=~nobody-of-this-name/rows.jsonl"])

    assert launch.spec.data.path == f"{launch.path.parent}/~nobody-of-this-name/rows.jsonl"


def test_what_is_sent_validates_again(tmp_path: Path) -> None:
    launch = read_launch_file(written(tmp_path, SPEC))

    assert launch.document["reward"]["components"][0]["path"] == f"{tmp_path / 'grade.py'}:score"


def test_the_shipped_experiments_are_valid() -> None:
    for path in (Path(__file__).parents[3] / "examples" / "arithmetic").glob("*.yaml"):
        launch = read_launch_file(path, ["seed=2"])

        assert launch.prepare is not None
        assert launch.spec.evaluation is not None
        assert launch.spec.model.path.startswith(str(path.parent / launch.prepare.output))


def test_a_name_on_the_hub_is_no_path_unless_a_folder_says_so(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    written = {
        "name": "t",
        "model": {"path": "Qwen/Qwen3-0.6B", "revision": "main"},
        "data": {"path": "train.jsonl"},
        "reward": {"components": [{"kind": "numeric"}]},
        "optimisation": {"steps": 1},
    }
    path.write_text(yaml.safe_dump(written))
    assert read_launch_file(path).spec.model.path == "Qwen/Qwen3-0.6B"

    made = {"command": ["python", "make.py"], "output": "models/mine"}
    path.write_text(yaml.safe_dump(written | {"model": {"path": "models/base"}, "prepare": made}))
    assert read_launch_file(path).spec.model.path == str(tmp_path / "models" / "base")

    (tmp_path / "Qwen").mkdir()
    path.write_text(yaml.safe_dump(written))
    with pytest.raises(InvalidSpec, match="revision has an effect only where path is a name on the hub"):
        read_launch_file(path)


def test_what_is_no_text_is_said_in_words(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_bytes(b"name: \xff\xfe")

    with pytest.raises(InvalidSpec, match=r"cannot read .*spec.yaml: it is no text \(UTF-8\)$"):
        read_launch_file(path)
