"""Rows of a class of the user's: read here, or in a child process that knows no secret of the service.

As a program it reads one JSON line (reference, options, limit, field) and writes rows, one JSON line each.
"""

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flotilla.services.gateway.datasets.columns import Row
from flotilla.shared.children.confinement import confine
from flotilla.shared.children.custom_code import describe, load_callable
from flotilla.shared.children.processes import python_module
from flotilla.shared.children.secret_variables import without_secrets
from flotilla.shared.errors import DataError, FlotillaError, InvalidSpec, Unavailable, error_for_code
from flotilla.shared.net.absence import absent_or

WHAT = "custom dataset"
CHILD_SECONDS = 1800.0
DONE = "done"


def rows_of_child(reference: str, options: dict[str, Any], limit: int | None, field: str) -> list[Row]:
    """Read all rows of the user's class in a process of its own; blocks.

    Raises:
        InvalidSpec, DataError: as ``custom_rows``, or the process ended, or took too long.
    """
    asked = json.dumps([reference, options, limit, field])
    environment = without_secrets(os.environ)
    with subprocess.Popen(
        python_module(__name__),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=environment,
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        deadline = threading.Timer(CHILD_SECONDS, child.kill)
        deadline.start()
        try:
            child.stdin.write(asked + "\n")
            child.stdin.close()
            rows: list[Row] = []
            for line in child.stdout:
                answer = json.loads(line)
                if isinstance(answer, dict):
                    rows.append(answer)
                elif answer == DONE:
                    return rows
                else:
                    raise error_for_code(answer[0])(answer[1], path=reference)
        except (OSError, ValueError, IndexError) as error:
            raise DataError(
                f"{WHAT} {reference!r}: its process wrote what is no row: {error}", path=reference
            ) from None
        finally:
            deadline.cancel()
            child.kill()
    code = child.wait()
    kind = Unavailable if code == -signal.SIGKILL else DataError
    raise kind(f"{WHAT} {reference!r}: its process ended with code {code}", path=reference)


def custom_rows(reference: str, options: dict[str, Any], limit: int | None, field: str) -> list[Row]:
    """Read all rows of the user's class: it is asked once, in order, so what it computes cannot change meanwhile.

    Raises:
        InvalidSpec: there is no such class, or the options do not fit it.
        DataError: it raised, or a row is no dict.
    """
    make = load_callable(reference, what=WHAT, kind="class", accepts=inspect.isclass)
    path = Path(reference.rpartition(":")[0]).expanduser().resolve()
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        raise InvalidSpec(f"{WHAT} {reference!r}: {field}.options do not fit its constructor: {error}") from error
    try:
        return [_checked(row, number, reference) for number, row in enumerate(_iterate(make(**options), limit))]
    except FlotillaError:
        raise
    except Exception as error:  # whatever the user's class raises
        raise absent_or(
            error, DataError(f"{WHAT} {reference!r} failed: {describe(error, path)}", path=reference)
        ) from error


def _iterate(dataset: Any, limit: int | None) -> Iterator[Any]:
    for name in ("__len__", "__getitem__"):
        if not hasattr(dataset, name):
            raise TypeError(f"it has no {name}")
    num_rows = len(dataset)
    return (dataset[index] for index in range(num_rows if limit is None else min(limit, num_rows)))


def _checked(row: Any, number: int, reference: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"row {number} of {WHAT} {reference!r} is {type(row).__name__}, not a dict", path=reference)
    return row


def main() -> int:
    """Answer on what was standard output; what the user's code prints goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        reference, options, limit, field = json.loads(sys.stdin.readline())
        confine()
        try:
            for row in custom_rows(reference, options, limit, field):
                answers.write(json.dumps(row, default=_plain) + "\n")
            answers.write(json.dumps(DONE) + "\n")
        except FlotillaError as error:
            answers.write(json.dumps([error.code, error.detail]) + "\n")
        except (TypeError, ValueError) as error:
            detail = f"{WHAT} {reference!r}: a row holds what JSON cannot: {error}"
            answers.write(json.dumps([DataError.code, detail]) + "\n")
    return 0


def _plain(value: Any) -> Any:
    """Make a plain value of numpy's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


if __name__ == "__main__":
    sys.exit(main())
