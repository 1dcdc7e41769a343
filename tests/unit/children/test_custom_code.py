"""What the user's code imports beside itself, in each of the processes that run it."""

from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.datasets.custom import rows_of_child
from flotilla.services.reward.verifiers.custom_process import CustomProcessVerifier
from flotilla.services.rollout.custom.process import CustomProcess
from flotilla.shared.children import calls
from flotilla.shared.children.calls import BlockingCalls
from flotilla.shared.config.sections.episodes import EnvironmentConfig
from flotilla.shared.config.sections.reward import CustomConfig
from flotilla.shared.errors import DataError
from flotilla.shared.schemas.grading import Grade, GradingSample

HELPERS = "def ok():\n    return 0.5\n"
GRADER = "def score(sample):\n    return ok()\n"


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


async def graded(reference: str) -> Grade:
    verifier = CustomProcessVerifier(CustomConfig(path=reference), None)
    try:
        (grade,) = await verifier.score([GradingSample(id="1/0", prompt="p", response="r")])
    finally:
        await verifier.aclose()
    return grade


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ({"helpers.py": HELPERS, "grade.py": "from helpers import ok\n" + GRADER}, "grade.py"),
        ({"helpers/__init__.py": HELPERS, "grade.py": "from helpers import ok\n" + GRADER}, "grade.py"),
        ({"g/helpers.py": HELPERS, "g/__init__.py": "from .helpers import ok\n" + GRADER}, "g/__init__.py"),
        ({"g/helpers.py": HELPERS, "g/__init__.py": "", "g/m.py": "from .helpers import ok\n" + GRADER}, "g/m.py"),
        ({"g/helpers.py": HELPERS, "g/__init__.py": "", "g/m.py": "from g.helpers import ok\n" + GRADER}, "g/m.py"),
        ({"g/helpers.py": HELPERS, "g/__init__.py": "", "g/m.py": "from helpers import ok\n" + GRADER}, "g/m.py"),
        ({"shared/__init__.py": HELPERS, "grade.py": "from shared import ok\n" + GRADER}, "grade.py"),
        ({"shared/text.py": HELPERS, "grade.py": "from shared.text import ok\n" + GRADER}, "grade.py"),
        (
            {"services/a/b.py": HELPERS, "services/__init__.py": "", "x.py": "from services.a.b import ok\n" + GRADER},
            "x.py",
        ),
        (
            {"shared.py": HELPERS, "grade.py": "def score(sample):\n    from shared import ok\n    return ok()\n"},
            "grade.py",
        ),
        (
            {
                "shared/rows.jsonl": "",
                "grade.py": "from flotilla.shared.schemas.grading import Grade\n"
                "def score(_):\n    return Grade.scored(0.5)\n",
            },
            "grade.py",
        ),
    ],
)
async def test_a_grader_imports_what_is_beside_it(tmp_path: Path, files: dict[str, str], place: str) -> None:
    grade = await graded(f"{written(tmp_path, files)}/{place}:score")

    assert (grade.reward, grade.reason) == (0.5, None)


async def test_environments_and_tools_import_what_is_beside_them(tmp_path: Path) -> None:
    maze = "from shared.seen import text\nclass Maze:\n  def reset(self, seed): return text\n  def step(self, t): ...\n"
    tool = "from words import text\ndef tell() -> str:\n    return text\n"
    written(tmp_path, {"maze/shared/seen.py": "text = 'a wall'\n", "maze/maze.py": maze})
    written(tmp_path, {"tool/words.py": "text = 'hello'\n", "tool/tool.py": tool})
    config = EnvironmentConfig(environment=f"{tmp_path}/maze/maze.py:Maze")
    process = CustomProcess([config], [f"{tmp_path}/tool/tool.py:tell"])
    try:
        await process.start()
        number = await process.make(config)

        assert (await process.ask("reset", number, (1, {})))[0] == "a wall"
        assert await process.ask("call", 0, [{}, None]) == "hello"
    finally:
        await process.aclose()


def test_a_dataset_imports_what_is_beside_it(tmp_path: Path) -> None:
    rows = "from shared.places import ROWS\nclass Rows(list):\n    def __init__(self): super().__init__(ROWS)\n"
    written(
        tmp_path,
        {"shared/__init__.py": "", "shared/places.py": "ROWS = [{'prompt': 'p'}]\n", "rows.py": rows},
    )

    assert rows_of_child(f"{tmp_path}/rows.py:Rows", {}, None, "data") == [{"prompt": "p"}]


def test_a_dataset_whose_process_ends_between_two_calls_gives_no_row_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Calls(BlockingCalls):
        def call(self, content: object, *, seconds: float | None) -> Any:
            answer = super().call(content, seconds=seconds)
            self._portal.call(self._process.aclose)
            return answer

    rows = "class Rows(list):\n    def __init__(self): super().__init__([{'prompt': 'p' * 4000}] * 300)\n"
    written(tmp_path, {"rows.py": rows})
    assert len(rows_of_child(f"{tmp_path}/rows.py:Rows", {}, None, "data")) == 300

    monkeypatch.setattr(calls, "BlockingCalls", Calls)
    with pytest.raises(DataError, match="its process ended, and began again at row 26"):
        rows_of_child(f"{tmp_path}/rows.py:Rows", {}, 280, "data")
