"""The reference page says what the classes say."""

from pathlib import Path

from shared.config.reference_page import render

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_committed_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), (
        "run: python -m shared.config.reference_page > docs/configuration.md"
    )


def test_every_key_is_explained() -> None:
    unexplained = {
        line.split("|")[1].strip() for line in render().splitlines() if line.startswith("| `") and "|  |" in line
    }

    assert unexplained == set()
