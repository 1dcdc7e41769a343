"""The connection goes to the checked address, and the certificate must still be the name's."""

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from flotilla.services.reward.remote import RemoteVerifier
from flotilla.shared.config.sections.reward import RemoteConfig
from flotilla.shared.schemas.trajectory import GradeStatus
from tests.unit.reward.builders import a_sample

ANSWER = b'{"grades": [{"reward": 0.5}]}'


def a_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", f"subjectAltName=DNS:{name}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    await reader.readexactly(length)
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(ANSWER) + ANSWER)
    await writer.drain()
    writer.close()


async def resolve_here(_host: str, _port: int) -> list[str]:
    return ["127.0.0.1"]


@pytest.mark.parametrize(("name", "reward"), [("grader.test", 0.5), ("another.test", None)])
async def test_the_certificate_must_be_the_names(tmp_path: Path, name: str, reward: float | None) -> None:
    key, certificate = await asyncio.to_thread(a_certificate, tmp_path, "grader.test")
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate, key)
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=serving)
    port = server.sockets[0].getsockname()[1]
    trusting = ssl.create_default_context(cafile=str(certificate))
    client = httpx.AsyncClient(verify=trusting, trust_env=False)
    config = RemoteConfig(url=f"https://{name}:{port}/", allow_private=True, max_attempts=1)
    async with server:
        verifier = RemoteVerifier(config, "exp", client, resolver=resolve_here)
        (found,) = await verifier.score([a_sample("x")])
        await verifier.aclose()

    assert found.reward == reward
    assert (found.status is GradeStatus.ERROR) is (reward is None)
    assert reward is not None or "CERTIFICATE_VERIFY_FAILED" in (found.reason or "")
