"""The reference page says what the classes say."""

from pathlib import Path

from flotilla.shared.config.load.reference_page import render

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_committed_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), (
        "run: python -m flotilla.shared.config.load.reference_page > docs/configuration.md"
    )


def test_every_key_is_explained() -> None:
    unexplained = {
        line.split("|")[1].strip() for line in render().splitlines() if line.startswith("| `") and "|  |" in line
    }

    assert unexplained == set()


def rows() -> list[list[str]]:
    """Cells of each key's row, without what is escaped."""
    lines = render().replace("\\|", "").splitlines()
    return [line.strip("|").split("|") for line in lines if line.startswith("| `")]


def test_every_row_is_one_line_of_four_cells_that_ends_with_a_sentence() -> None:
    """Defaults of several lines, and first lines of longer sentences, would break or cut it."""
    cut = [cells for cells in rows() if len(cells) != 4 or not cells[3].rstrip().endswith((".", ")", "`"))]
    lines = render().split("## `experiment`")[1].splitlines()

    assert cut == []
    assert [line for line in lines if line.startswith("| ") and not line.endswith(" |")] == []


def test_types_and_defaults_are_written_as_in_a_spec() -> None:
    page = render()

    for row in (
        "| `columns` | mapping of prompt or label or data_source to str | `{}` |",
        "| `options` | mapping of str to any value or null | `null` |",
        "| `sources` | list of sections | `null` |",
        "| `environments` | list of sections | required |",
        "| `betas` | list of float | `[0.9, 0.95]` |",
        '| `tags` | list of str | `["think", "answer"]` |',
        "| `asynchronous` | bool | `true` |",
    ):
        assert row in page, row
