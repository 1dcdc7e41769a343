"""What a fork server imports at the interpreter's start: it serves here, and its children run their program here."""

import os
import sys

_BEFORE = tuple(sys.modules)
_PATHS = os.environ["PYTHONPATH"].split(os.pathsep)
# dataclasses asks it for the signature of a class without a docstring, which the guard has none of; what it loads would
# be shared with every fork, and that takes time by the page. Programs get the real one.
sys.modules.setdefault("inspect", type(sys)("inspect"))

from flotilla.services.sandbox.guard.fork_server import serve  # noqa: E402
from flotilla.services.sandbox.guard.python_main import run  # noqa: E402
from flotilla.services.sandbox.guard.session_main import converse  # noqa: E402

if serve(_PATHS, _BEFORE):
    converse()
run(sys.argv[0])
