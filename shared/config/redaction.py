"""What of a spec and of logs others may see: passwords and keys inside of URLs, headers and commands are left out.

Logs are read as they come in, so no pattern takes more time than in proportion to the text: names are taken whole, by
possessive quantifiers, matched on their own.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

HIDDEN: Final = "***"
_SENSITIVE = r"(?:token|api-?_?key|access-?_?key|secret|signature|\bsig\b|password|passwd|pwd|credential|auth)"
_USER = re.compile(r"(?<=://)[^/?#\s]*@")
_QUERY = re.compile(r"([?&;#]([^=?&;#\s]*+)=)[^&;#\s\"']+")
_PARAMETER = re.compile(rf"{_SENSITIVE}|\A(?:key|code)\Z", re.IGNORECASE)
_SECRET = re.compile(_SENSITIVE, re.IGNORECASE)
_ARGUMENT = re.compile(r"(--?[\w-]*+=).+", re.DOTALL)
_OPTION = re.compile(r"--?[\w-]*+")
_KEY = re.compile(
    r"(?:x[-_])?(?:authorization|cookie|password|passwd|secret|credentials?|(?:\w+[-_])?(?:api|access|secret)[-_]?key|"
    r"(?:access|auth|bearer|api)[-_]?token)",
    re.IGNORECASE,
)
_WORDS = r"token(?!s$|s_|i[sz]er)|secret|password|passwd|passphrase|credential|(?:api|access|private)_?key|"
_VARIABLE = re.compile(
    _WORDS + r"(?:^|_)(?:auth|keys?|pass|pwd|cookie|private|dsn|signature)(?:_|$)",
    re.IGNORECASE,
)
"""Names of environment variables that hold secrets; ``MAX_TOKENS`` and ``TOKENIZER`` do not."""
_LOGGED = re.compile(_WORDS + r"(?:^|_)(?:auth|authorization|pwd|cookie)(?:_|$)", re.IGNORECASE)
"""Names before values in a line of a log, where a ``key`` is most often none that opens anything."""
_NAMED = re.compile(
    r"(?<![\w-])([\w-]++)(\\*+[\"']?\s*+[=:]\s*+\\*+[\"']?)((?:(?:bearer|basic|token|digest)\s++)?[^\s\"'&,;)]+)",
    re.IGNORECASE,
)
_FOLLOWED = re.compile(r"(?<![\w-])(--?[A-Za-z][\w-]*+)(\\*+[\"']?,?\s++\\*+[\"']?)([^\s\"'-][^\s\"']*+)")
_KNOWN = (
    (re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]+", re.IGNORECASE), r"\1 ***"),
    (re.compile(r"\b(?:fl[a-z]|tml)[_-][\w.-]{16,}", re.IGNORECASE), HIDDEN),
    (re.compile(r"\b(?:sk|hf|ghp|AKIA)[-_]?[A-Za-z0-9_-]{16,}"), HIDDEN),
)
"""What secrets look like, whatever their names."""
_COMMANDS = frozenset({"harness"})
"""Commands of a shell, in one text."""
_VALUES = frozenset({"headers", "env"})
"""Mappings of which every value may be a secret."""


def may_be_secret(name: str, value: str) -> bool:
    """Return whether an environment variable may hold a secret, by its name or by what is hidden of its value."""
    return _VARIABLE.search(name) is not None or redacted_text(value) != value


def redacted_text(text: str) -> str:
    """Leave out users with their passwords, and the values of parameters that look like secrets, of the URLs in it."""
    if "://" not in text:
        return text
    return _without_parameters(_USER.sub(f"{HIDDEN}@", text))


def redacted_line(text: str) -> str:
    """Leave out what looks like a token, a password or a key in a line of a log, whichever process wrote it."""
    for pattern, replacement in _KNOWN:
        text = pattern.sub(replacement, text)
    text = _without_parameters(_USER.sub(f"{HIDDEN}@", text))
    return _FOLLOWED.sub(_value_hidden, _NAMED.sub(_value_hidden, text))


def _without_parameters(text: str) -> str:
    return _QUERY.sub(lambda found: found[1] + HIDDEN if _PARAMETER.search(found[2]) else found[0], text)


def _value_hidden(found: re.Match[str]) -> str:
    is_secret = _LOGGED.search(found[1].replace("-", "_")) is not None
    return found[1] + found[2] + HIDDEN if is_secret else found[0]


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
    if name in _COMMANDS and isinstance(value, str):
        return redacted_line(value)
    if name in _VALUES and isinstance(value, Mapping):
        return dict.fromkeys(value, HIDDEN)
    return redacted(value)


def _of_argument(before: Any, value: Any) -> Any:
    if isinstance(value, str) and isinstance(before, str) and _OPTION.fullmatch(before) and _SECRET.search(before):
        return HIDDEN
    if isinstance(value, str) and (found := _ARGUMENT.fullmatch(value)) and _SECRET.search(found[1]):
        return found[1] + HIDDEN
    return redacted(value)
