"""What of a spec others may see: passwords and keys inside of URLs, headers and commands are left out."""

import re
from collections.abc import Mapping
from typing import Any, Final

HIDDEN: Final = "***"
_SENSITIVE = r"(?:token|api-?_?key|access-?_?key|secret|signature|\bsig\b|password|passwd|pwd|credential|auth)"
_USER = re.compile(r"(?<=://)[^/?#\s]*@")
_QUERY = re.compile(rf"([?&;#][^=&;#\s]*{_SENSITIVE}[^=&;#\s]*=)[^&;#\s]+", re.IGNORECASE)
_SHORT_QUERY = re.compile(r"([?&;](?:key|sig|code|auth)=)[^&;#\s]+", re.IGNORECASE)
_ARGUMENT = re.compile(rf"(--?[\w-]*{_SENSITIVE}[\w-]*=).+", re.IGNORECASE | re.DOTALL)
_OPTION = re.compile(rf"--?[\w-]*{_SENSITIVE}[\w-]*", re.IGNORECASE)
_KEY = re.compile(
    r"(?:x[-_])?(?:authorization|cookie|password|passwd|secret|credentials?|(?:\w+[-_])?(?:api|access|secret)[-_]?key|"
    r"(?:access|auth|bearer|api)[-_]?token)",
    re.IGNORECASE,
)
_VARIABLE = re.compile(
    r"token(?!s$|s_|i[sz]er)|secret|password|passwd|passphrase|credential|api_?key|"
    r"(?:^|_)(?:auth|keys?|pass|pwd|cookie|private|dsn|signature)(?:_|$)",
    re.IGNORECASE,
)
"""Names of environment variables that hold secrets; ``MAX_TOKENS`` and ``TOKENIZER`` do not."""
_VALUES = frozenset({"headers", "env"})
"""Mappings of which every value may be a secret."""


def may_be_secret(name: str, value: str) -> bool:
    """Return whether an environment variable may hold a secret, by its name or by what is hidden of its value."""
    return _VARIABLE.search(name) is not None or redacted_text(value) != value


def redacted_text(text: str) -> str:
    """Leave out users with their passwords, and the values of parameters that look like secrets, of the URLs in it."""
    if "://" not in text:
        return text
    return _SHORT_QUERY.sub(rf"\1{HIDDEN}", _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(f"{HIDDEN}@", text)))


def redacted(document: Any) -> Any:
    """Leave them out of everything in a document, and what headers and arguments named like secrets say."""
    if isinstance(document, str):
        return redacted_text(document)
    if isinstance(document, Mapping):
        return {name: _of_field(name, value) for name, value in document.items()}
    if isinstance(document, list | tuple):
        return [_of_argument(before, each) for before, each in zip((None, *document), document, strict=False)]
    return document


def _of_field(name: str, value: Any) -> Any:
    if isinstance(value, str) and _KEY.fullmatch(name):
        return HIDDEN
    if name in _VALUES and isinstance(value, Mapping):
        return dict.fromkeys(value, HIDDEN)
    return redacted(value)


def _of_argument(before: Any, value: Any) -> Any:
    if isinstance(value, str) and isinstance(before, str) and _OPTION.fullmatch(before):
        return HIDDEN
    if isinstance(value, str) and (found := _ARGUMENT.fullmatch(value)):
        return found[1] + HIDDEN
    return redacted(value)
