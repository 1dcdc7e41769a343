"""ROLL's scripts: the file that one gives to a pipeline is read; other pipelines are refused by name."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from flotilla.cli.__main__ import main
from flotilla.importers.build import Imported, build
from flotilla.importers.systems import SYSTEMS, read
from shared.errors import InvalidSpec
from tests.unit.importers.sources import BASES, nested

CONFIG = yaml.safe_dump(nested(BASES["roll"]))
START = "python examples/start_rlvr_pipeline.py"


def of_script(text: str, files: Mapping[str, str]) -> Imported:
    return build(SYSTEMS["roll"], read("roll", text, (), {}, source="run.sh", beside=files.get))


@pytest.mark.parametrize(
    ("command", "place"),
    [
        (f"{START} --config_path qwen --config_name rlvr", "examples/qwen/rlvr"),
        (f"{START} --config_path=qwen --config_name=rlvr.yaml", "../../examples/qwen/rlvr"),
        (f"{START} --config_path qwen --config_name rlvr", "rlvr"),
        (f"{START} --config_path $(basename $(dirname $0)) --config_name rlvr", "rlvr"),
        ("ROLL_PATH=/r\npython $ROLL_PATH/examples/start_rlvr_pipeline.py --config_name rlvr", "/r/examples/rlvr"),
    ],
)
def test_the_file_of_a_pipeline_is_read(command: str, place: str) -> None:
    found = of_script(f"#!/bin/bash\nset +x\n{command}\n", {place: CONFIG})

    assert found.may_run(), found.report.render()
    assert found.spec is not None and found.spec.optimisation.steps == 10


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        ("dpo", "reinforcement only"),
        ("sft", "reinforcement only"),
        ("rlvr_vl", "no images"),
        ("mine", "that this importer"),
    ],
)
def test_another_pipeline_is_refused_by_name(pipeline: str, said: str) -> None:
    found = of_script(f"python examples/start_{pipeline}_pipeline.py --config_name rlvr\n", {"rlvr": CONFIG})

    refused = {entry.name: (entry.value, entry.detail) for entry in found.report.refused}
    assert refused["python"][0] == f"start_{pipeline}_pipeline.py" and said in refused["python"][1]
    assert not found.may_run()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo hello", "must start one pipeline"),
        (f"{START} --config_name a\n{START} --config_name b", "must start one pipeline"),
        (f"{START} --config_path qwen --config_name rlvr", "give --config-dir DIR"),
        (START, "give --config_name"),
        (f"{START} --config_name $(date)", "what a command prints is not known"),
    ],
)
def test_what_cannot_be_found_is_a_message(text: str, said: str) -> None:
    with pytest.raises(InvalidSpec, match=said):
        of_script(text, {})


def test_files_that_it_names_are_looked_for_from_its_own_folder() -> None:
    base = "defaults: [../config/base@_here_]\n" + CONFIG

    found = of_script(
        f"{START} --config_path qwen --config_name rlvr",
        {"examples/qwen/rlvr": base, "examples/config/base": "seed: 5"},
    )

    assert found.spec is not None and found.spec.seed == 5


def test_the_folder_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rlvr.yaml").write_text(CONFIG)
    script = tmp_path / "run.sh"
    script.write_text(f"{START} --config_path qwen --config_name rlvr\n")
    command = ["import", "roll", str(script)]

    assert main(command) == 1
    assert "rlvr" in capsys.readouterr().err
    assert main([*command, "--config-dir", str(tmp_path / "elsewhere")]) == 0
