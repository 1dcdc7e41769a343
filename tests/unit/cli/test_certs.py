"""The authority of a fleet is made once: neither a host nor a missing key replaces it."""

import argparse
from pathlib import Path

import pytest

from flotilla.cli.commands import certs
from flotilla.shared.errors import InvalidRequest


@pytest.mark.parametrize("missing", ["ca.key", "ca.pem"])
async def test_an_authority_that_lacks_a_file_is_not_replaced(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / ("ca.pem" if missing == "ca.key" else "ca.key")
    kept.write_text("of the authority")
    calls: list[object] = []
    monkeypatch.setattr(certs, "_openssl", calls.append)
    monkeypatch.setattr(certs.shutil, "which", lambda _: "/usr/bin/openssl")

    with pytest.raises(InvalidRequest, match=f"{missing} is not there"):
        await certs.certs(argparse.Namespace(folder=str(tmp_path), hosts=["worker"], days=1))

    assert calls == [] and kept.read_text() == "of the authority"


async def test_no_host_has_the_name_of_the_authority(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="authority"):
        await certs.certs(argparse.Namespace(folder=str(tmp_path), hosts=["ca"], days=1))
