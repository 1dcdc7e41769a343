"""Errors by their code, as they are raised again on the other side of a wire."""

from flotilla.shared.errors import FlotillaError, NotFound, error_for_code


def test_a_subclass_that_shares_its_parents_code_does_not_stand_for_it() -> None:
    class Numbered(FlotillaError):
        def __init__(self, status: int, reason: str) -> None:
            super().__init__(f"{status}: {reason}")

    class Elsewhere(NotFound):
        def __init__(self) -> None:
            super().__init__("elsewhere")

    assert Numbered.code == FlotillaError.code and Elsewhere.code == NotFound.code
    assert error_for_code(FlotillaError.code) is FlotillaError
    assert error_for_code(NotFound.code) is NotFound
