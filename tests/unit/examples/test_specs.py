"""Every example's experiment file is valid, and the notebooks are such as have not been run."""

import json
from pathlib import Path

import pytest

from flotilla.launch_file import read_launch_file

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_an_examples_file_is_valid_and_makes_what_it_needs(path: Path) -> None:
    launch = read_launch_file(path)

    assert launch.prepare is not None
    output = (path.parent / launch.prepare.output).resolve()
    assert Path(launch.spec.model.path).resolve().is_relative_to(output)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("**/*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_has_no_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text())

    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) > 3
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * len(code)
