"""What a fork server imports at the interpreter's start: it serves here, and its children run their program here."""

import os
import sys

_BEFORE = tuple(sys.modules)
_PATHS = os.environ["PYTHONPATH"].split(os.pathsep)

from services.sandbox.guard.fork_server import serve  # noqa: E402
from services.sandbox.guard.python_main import run  # noqa: E402
from services.sandbox.guard.session_main import converse  # noqa: E402

if serve(_PATHS, _BEFORE):
    converse()
run(sys.argv[0])
