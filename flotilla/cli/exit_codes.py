"""What a command's exit code says; documented in ``docs/cli.md``."""

from enum import IntEnum

from flotilla.shared.errors import Conflict, FlotillaError, Forbidden, NotFound, Unauthorized


class ExitCode(IntEnum):
    """Codes from 3 on name the side at fault: a script may repeat after 4, never after 2."""

    DONE = 0
    FAILED = 1
    """The experiment failed, a check found something, or a spec, model or data set is not valid."""
    USAGE = 2
    """The command line is wrong; argparse's own code."""
    NOT_FOUND = 3
    """Nothing is called like that."""
    UNREACHABLE = 4
    """No fleet runs there, or its gateway does not answer; the same may succeed later."""
    REFUSED = 5
    """The token is missing, wrong or not for this, the state does not allow it, or a name means several experiments."""
    INTERRUPTED = 130
    """By Ctrl-C or SIGTERM."""


def exit_code_of(error: FlotillaError) -> ExitCode:
    """Choose the code that an error ends a command with."""
    if isinstance(error, NotFound):
        return ExitCode.NOT_FOUND
    if isinstance(error, Unauthorized | Forbidden | Conflict):
        return ExitCode.REFUSED
    return ExitCode.UNREACHABLE if error.retryable else ExitCode.FAILED
