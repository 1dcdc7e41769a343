"""What counts as a line of source."""

from tests.suite.sizes import source_lines


def test_docstrings_comments_and_blanks_are_no_source() -> None:
    text = '''"""A module."""

import os
from a import (
    b,
)

# A comment.
X = """text
that is kept"""
"""Of X."""


def f() -> str:  # source, with a comment
    """Two
    lines."""
    return os.sep + b
'''

    lines, imports = source_lines(text)

    assert lines == {3, 4, 5, 6, 9, 10, 14, 17}
    assert imports == {3, 4, 5, 6}
