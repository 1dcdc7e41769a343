"""Which errors pass by themselves: a full disk, a busy machine, a server that does not answer are absence, not failure.

``absent_or`` is for the place where a foreign error becomes one of ours that ends an experiment: what may
succeed on trying again becomes ``Unavailable`` there, which is waited for and named meanwhile.
"""

import errno
import socket
import subprocess
from collections.abc import Iterator
from typing import Final

from flotilla.shared.errors import FlotillaError, Unavailable

PASSING: Final = frozenset(
    getattr(errno, name)
    for name in (
        *("ENOSPC", "EDQUOT", "ENOMEM", "EMFILE", "ENFILE", "EAGAIN", "EBUSY", "ETXTBSY", "EINTR", "ESTALE"),
        *("ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH", "ETIMEDOUT", "ENOTCONN", "ENOBUFS"),
    )
)
"""Of the system: no room, no memory, too many processes or files, a file system or network that does not answer."""
BUSY_STATUS: Final = frozenset({408, 425, 429, 502, 503, 504})
"""Of HTTP: a server that answers, and cannot now."""
_KINDS: Final = frozenset(
    {
        *("OutOfMemoryError", "ClosedResourceError", "BrokenResourceError", "EndOfStream"),
        *("NetworkError", "TimeoutException", "RemoteProtocolError", "ConnectionError", "Timeout"),
    }
)
"""Classes of torch, anyio, httpx and requests, which are not imported for this: some do not name their causes."""
_NO_MEMORY: Final = "can't allocate memory"
"""The message of torch on a CPU, in a plain RuntimeError."""


def may_pass(error: BaseException) -> bool:
    """Return whether trying again with the same inputs may help; what an error followed from counts as well.

    What was refused stays refused, such as an address that the operator does not allow.
    """
    causes = list(_causes(error))
    return not any(isinstance(each, PermissionError) for each in causes) and any(map(_passes, causes))


def absent_or(error: BaseException, otherwise: FlotillaError) -> FlotillaError:
    """Return what to raise: ``Unavailable`` in the words of ``otherwise`` if the error may pass, else that itself."""
    if not may_pass(error):
        return otherwise
    absent = Unavailable(otherwise.detail)
    absent.context = otherwise.context
    return absent


def _passes(error: BaseException) -> bool:
    if isinstance(error, FlotillaError):
        return error.retryable
    if isinstance(error, MemoryError | TimeoutError | ConnectionError | subprocess.TimeoutExpired):
        return True
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN
    if isinstance(error, OSError) and error.errno in PASSING:
        return True
    status = getattr(getattr(error, "response", None), "status_code", None)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return status in BUSY_STATUS or not kinds.isdisjoint(_KINDS) or _NO_MEMORY in str(error)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Go through an error, those it groups, and those it was raised from."""
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, BaseExceptionGroup):
            waiting.extend(each.exceptions)
        if each.__cause__ is not None:
            waiting.append(each.__cause__)
        elif each.__context__ is not None and not each.__suppress_context__:
            waiting.append(each.__context__)
