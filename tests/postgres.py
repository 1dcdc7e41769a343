"""A PostgreSQL server of our own for tests, where its binaries are found."""

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla.shared.net.server.ports import lasting_port

FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


def postgres_binary(name: str) -> str | None:
    """Find a server binary beside the package's, or on the path."""
    beside = next((str(folder / name) for folder in FOLDERS if (folder / name).is_file()), None)
    return beside or shutil.which(name)


def unprivileged() -> dict[str, object]:
    """Arguments that let a subprocess run as somebody else than root, whom PostgreSQL refuses."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL server of our own on a loopback port, for the whole run."""
    initdb, pg_ctl = postgres_binary("initdb"), postgres_binary("pg_ctl")
    if initdb is None or pg_ctl is None:
        pytest.skip("no PostgreSQL binaries here")
    pytest.importorskip("psycopg")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pg-")))
        who = unprivileged()
        if who:
            os.chown(folder, int(str(who["user"])), int(str(who["group"])))
        port = lasting_port("127.0.0.1")
        environment = {"PATH": os.environ["PATH"], "LC_ALL": "C", "HOME": str(folder)}
        common = {"cwd": folder, "env": environment, "stdout": subprocess.DEVNULL, "timeout": 120, **who}
        data = str(folder / "data")
        subprocess.run([initdb, "-D", data, "-U", "fleet", "-A", "trust", "-N"], check=True, **common)
        options = f"-c listen_addresses=127.0.0.1 -p {port} -k {folder} -c fsync=off -c shared_buffers=16MB"
        start = [pg_ctl, "-D", data, "-w", "-t", "60", "-l", str(folder / "log"), "-o", options, "start"]
        subprocess.run(start, check=True, **common)
        try:
            yield f"postgresql://fleet@127.0.0.1:{port}"
        finally:
            subprocess.run([pg_ctl, "-D", data, "-m", "immediate", "stop"], check=True, **common)


DATABASES = iter(range(1000))


def new_database(server: str) -> str:
    """Create an empty database and give its url."""
    import psycopg

    name = f"gateway{next(DATABASES)}"
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return f"{server}/{name}"
