"""Names of files below a folder, as they cross the wire."""

from typing import Annotated

from pydantic import AfterValidator

from flotilla.shared.files.beneath import Outside, components


def _is_plain(name: str) -> str:
    try:
        components(name)
    except Outside as error:
        raise ValueError(error.strerror) from None
    return name


PlainName = Annotated[str, AfterValidator(_is_plain)]
"""The name of a file below a folder, such as ``model/config.json``."""
