"""How a spec names code of the user's: a file and a name in it."""

import re
from typing import Annotated, Final

from pydantic import AfterValidator

IN_A_MODULE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def code_reference(reference: str) -> str:
    """Check that a text is ``file.py:name``, as which ``package.module:name`` was resolved before.

    Raises:
        ValueError: it is not; the message shows the expected form.
    """
    file, _, name = reference.rpartition(":")
    if file.endswith(".py") and len(file) > len(".py") and name.isidentifier():
        return reference
    if IN_A_MODULE.fullmatch(reference):
        place = reference.rpartition(":")[0].replace(".", "/")
        raise ValueError(
            f"there is neither {place}.py nor {place}/__init__.py in the spec file's folder (in a spec without a file, "
            "name the file by its absolute path)"
        )
    raise ValueError("must name something in a Python file, as FILE.py:NAME or PACKAGE.MODULE:NAME")


CodeReference = Annotated[str, AfterValidator(code_reference)]
