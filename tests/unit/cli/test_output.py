"""What is printed can be read by a person, and copied or piped by one."""

import io
import sys
from collections.abc import Sequence

import pytest
from rich.console import Console
from rich.table import Table

from flotilla.cli.output import fitting, new_console, table_of

ID = "a-rather-long-name-for-an-experiment-0a1b2c"


def printed(width: int) -> str:
    table = table_of(("id", "problem"), [(ID, "word " * 40)], whole=("id",))
    file = io.StringIO()
    Console(file=file, width=width, soft_wrap=True).print(table)
    return file.getvalue()


@pytest.mark.parametrize("width", [20, 60, 200])
def test_what_must_be_typed_is_never_shortened(width: int) -> None:
    assert ID in printed(width)


def test_a_table_that_is_too_wide_goes_without_what_may_be_left_out() -> None:
    def draw(left_out: Sequence[str]) -> Table:
        names = [name for name in ("id", "address", "pid") if name not in left_out]
        return table_of(names, [dict.fromkeys(names, ID)], whole=names)

    def columns(width: int) -> list[object]:
        console = Console(file=io.StringIO(), width=width)
        return [column.header for column in fitting(console, draw, ("pid", "address")).columns]

    assert [columns(width) for width in (200, 100, 50, 20)] == [
        ["id", "address", "pid"],
        ["id", "address"],
        ["id"],
        ["id"],
    ]


def test_a_pipe_gets_each_row_on_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert not sys.stdout.isatty()

    new_console().print(table_of(("id", "problem"), [(ID, "word " * 40)], title="[a] title"))
    new_console().print("line " * 60)

    lines = capsys.readouterr().out.splitlines()
    assert any(ID in line and line.count("word") == 40 for line in lines)
    assert any(line.count("line") == 60 for line in lines)
    assert not any("\x1b" in line for line in lines)
