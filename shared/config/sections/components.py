"""What reward components of every kind have in common, and the kinds of text that they are given."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from flotilla.shared.config.base.model import Config


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return pattern


def _has_a_group(pattern: str) -> str:
    if re.compile(pattern).groups < 1:
        raise ValueError("the pattern needs a group (...) around the answer")
    return pattern


RegularExpression = Annotated[str, AfterValidator(_compiles)]

AnswerPattern = Annotated[RegularExpression, AfterValidator(_has_a_group)]
"""A regular expression whose first group is the answer; the last match in the text counts."""


class ComponentConfig(Config):
    """What every component has."""

    name: str | None = Field(None, min_length=1)
    """Name of the component in grades and metrics. Null: its kind."""
    weight: float = 1.0
    """Factor of this component in the reward."""
    data_sources: tuple[str, ...] | None = Field(None, min_length=1)
    """Grade only samples of these data sources and abstain from others. Null: grade all."""


def well_formed_url(text: str) -> str:
    """Check that a text is the URL of a server.

    Raises:
        ValueError: it is not.
    """
    import httpx  # a tenth of a second of each process that reads a section, of which most are given no URL

    try:
        url = httpx.URL(text)
        has_host, port = bool(url.raw_host), url.port
    except (httpx.InvalidURL, ValueError) as error:
        raise ValueError(f"not a URL: {error}") from error
    if url.scheme not in {"http", "https"} or not has_host or " " in text or not text.isprintable():
        raise ValueError("not a URL of the form http://HOST[:PORT]/PATH or https://HOST[:PORT]/PATH")
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"port {port} is none")
    return text


GraderUrl = Annotated[str, AfterValidator(well_formed_url)]
