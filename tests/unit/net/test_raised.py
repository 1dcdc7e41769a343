"""What docstrings raise becomes answers."""

from flotilla.shared.net.server.description import without_raises


def test_what_is_raised_is_taken_out_by_status() -> None:
    description = """Do it; at once.

Raises:
    NotFound: there is no such
        experiment (404).
    InvalidSpec: it has mistakes (422).
    DataError, ModelError: what it points to is gone (422).
    Unavailable: not now (503, try again).
    EpisodeGone: it is over, or was refused (400, 410).
    ValueError: which is no answer.
"""

    text, reasons = without_raises(description)

    assert text == "Do it; at once."
    assert reasons == {
        404: "There is no such experiment.",
        422: "It has mistakes; or what it points to is gone.",
        503: "Not now.",
        400: "It is over, or was refused.",
        410: "It is over, or was refused.",
    }


def test_a_description_without_it_stays() -> None:
    assert without_raises("Look.") == ("Look.", {})
