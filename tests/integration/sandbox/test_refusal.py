"""A sandbox under which no isolation works says in one sentence what to set."""

import shutil

import pytest
from pydantic import SecretStr

from flotilla.services.sandbox.settings import SandboxSettings
from flotilla.services.sandbox.state import open_state
from flotilla.shared.errors import Unavailable


async def test_a_service_that_shares_its_uid_on_an_older_kernel_is_told_to_run_as_root(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    which = shutil.which
    monkeypatch.setattr("os.getuid", lambda: 1000)
    monkeypatch.setattr("flotilla.services.sandbox.guard.landlock.version", lambda: 5)
    monkeypatch.setattr("shutil.which", lambda name, path=None: None if name == "bwrap" else which(name, path=path))

    with pytest.raises(Unavailable) as caught:
        async with open_state(SandboxSettings(token=SecretStr("t" * 16))):
            pytest.fail("no level works")

    assert caught.value.detail.startswith("no isolation works here as uid 1000: run it as root")
    assert "C: the service is not root" in caught.value.detail
    assert "\n" not in caught.value.detail
