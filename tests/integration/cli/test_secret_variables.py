"""What a service was told at its start is in no environment that anybody else sees."""

import os
import subprocess
import sys

from flotilla.shared.environment.secret_variables import SECRETS, forget_secrets, without_secrets

CHILD = "import os, sys; sys.stdout.write(repr(dict(os.environ)))"
SERVICE = (
    "import subprocess, sys\n"
    "from pathlib import Path\n"
    "from flotilla.shared.environment.secret_variables import forget_secrets\n"
    "forget_secrets()\n"
    "print(Path('/proc/self/environ').read_bytes())\n"
    f"print(subprocess.run([sys.executable, '-c', {CHILD!r}], capture_output=True, text=True).stdout)\n"
)


def test_neither_children_nor_the_kernel_show_secrets_of_a_service_that_has_read_them() -> None:
    secret = "hidden-from-everybody"
    environment = {**os.environ, **dict.fromkeys(SECRETS, secret), "FLOTILLA_TOKEN_OF_MINE": "kept", "AFTER": "kept"}

    shown = subprocess.run(
        [sys.executable, "-c", SERVICE], env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout

    assert secret not in shown
    assert shown.count("FLOTILLA_TOKEN_OF_MINE") == shown.count("AFTER") == 2, "all else is left as it was"


def test_the_variables_are_taken_out_of_an_environment() -> None:
    given = {"FLOTILLA_TOKEN": "t", "FLOTILLA_DATABASE_URL": "u", "PATH": "/bin"}

    assert without_secrets(given) == {"PATH": "/bin"}
    forget_secrets(given)
    assert given == {"PATH": "/bin"}
