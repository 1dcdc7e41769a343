"""The languages that can be run here."""

import pytest

from flotilla.services.sandbox.languages import Language, choose
from flotilla.shared.errors import InvalidRequest


def test_a_language_is_found_under_the_other_name() -> None:
    language = Language("javascript", "/usr/bin/node", "main.js")

    assert choose({"javascript": language}, "nodejs") is language
    with pytest.raises(InvalidRequest, match="available: javascript"):
        choose({"javascript": language}, "python")
