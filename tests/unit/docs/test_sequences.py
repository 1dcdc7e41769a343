"""A sequence diagram of a page becomes a picture that says the same."""

from xml.etree import ElementTree

import pytest

from docs.site.build import ROOT, pages
from docs.site.sequences import UnknownLine, picture, with_pictures

TEXT = """
    participant T as trainer
    participant G as gateway
    T->>G: announce <v>
    alt all are there
        G->>G: commit
    else one is late
        G-->>T: again
        Note over T: keeps serving
    end
"""


def words(svg: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(svg).iter("text")]


def test_participants_messages_notes_and_branches_are_drawn_in_their_order() -> None:
    svg = picture(TEXT)

    assert words(svg) == [
        "trainer",
        "gateway",
        "announce <v>",
        "alt [all are there]",
        "commit",
        "[one is late]",
        "again",
        "(keeps serving)",
    ]
    assert svg.count("marker-end") == 3
    assert "\n\n" not in svg, "a blank line would end the block of HTML in a page"


def test_words_fit_between_their_participants() -> None:
    svg = picture("participant A as a\nparticipant B as b\nA->>B: " + "w" * 60)
    heads = [float(each.get("x", 0)) for each in ElementTree.fromstring(svg).iter("text")][:2]

    assert heads[1] - heads[0] >= 60 * 6


def test_a_line_that_is_not_read_is_an_error() -> None:
    with pytest.raises(UnknownLine, match="loop forever"):
        picture("participant A as a\nloop forever")


def test_no_page_of_the_site_has_a_diagram_that_stays_text() -> None:
    drawn = {page: with_pictures((ROOT / page).read_text(encoding="utf-8")) for page in pages(ROOT)}

    assert [page for page, text in drawn.items() if "```mermaid" in text] == []
    assert sum(text.count("<svg") for text in drawn.values()) >= 4
