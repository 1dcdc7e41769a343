"""Commands that pages show are commands that there are, and the page for beginners works as it is written."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from flotilla.cli.command_line import build_parser
from flotilla.launch_file import read_launch_file
from flotilla.services.gateway.preflight import checks
from flotilla.services.reward.verifiers.custom_process import grade_of, load_function

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "import").glob("*.md"),
        *(ROOT / "examples").glob("*/README.md"),
    ]
)
COMMAND = re.compile(r"^(?: {4})?(?:\$ )?(flotilla [^\n]*?)(?:\s{2,}#.*|\s+#.*)?$", re.MULTILINE)


def commands_of(page: Path) -> list[str]:
    """List the commands of the fenced and indented blocks, one by one."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```\w*\n(.*?)```|((?:^ {4}[^\n]*\n)+)", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in COMMAND.findall("".join(block)) if " / " not in line]
    return [
        part.strip() for line in lines for part in re.split(r";|&|\||>|<", line) if part.strip().startswith("flotilla")
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_that_a_page_shows_is_understood(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands_of(page):
        # What is in brackets may be left out.
        words = shlex.split(re.sub(r"\[[^]]*\]", "", command))[1:]
        try:
            build_parser().parse_args(words)
        except SystemExit as ended:
            assert ended.code == 0, f"{command}: {capsys.readouterr().err}"


def test_commands_are_found() -> None:
    assert "flotilla up --detach --trainers 3 --rewards 3 --rollouts 3" in commands_of(ROOT / "docs" / "sweeps.md")
    assert sum(len(commands_of(page)) for page in PAGES) > 40


def test_the_page_for_beginners_works_as_it_is_written(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "your-own.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL))
    for name, language in (("train.jsonl", "jsonl"), ("heldout.jsonl", "jsonl"), ("grade.py", "python")):
        (tmp_path / name).write_text(blocks[language])
    path = tmp_path / "experiment.yaml"
    path.write_text(blocks["yaml"])

    spec = read_launch_file(path).spec
    checks.check_functions(spec)
    rows = checks.train_dataset(spec).rows
    component = spec.reward.components[0]
    score = load_function(component.path)  # type: ignore[union-attr]

    assert spec.model.is_hub_name
    assert [dict(row) for row in rows] == [json.loads(line) for line in blocks["jsonl"].splitlines()]
    right, wrong = (SimpleNamespace(response=text, label="42", metadata={}) for text in ("so #### 42", "#### 41"))
    assert [grade_of(score(sample)).reward for sample in (right, wrong)] == [1.0, 0.0]  # type: ignore[arg-type]
