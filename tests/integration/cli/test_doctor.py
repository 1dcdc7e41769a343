"""``flotilla doctor`` on this machine, with a Redis server that is not there."""

import json
from pathlib import Path

import pytest

from flotilla.cli.__main__ import main
from flotilla.shared.net.server.ports import lasting_port

pytestmark = pytest.mark.slow


def test_this_machine_lacks_only_what_was_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLOTILLA_REDIS_URL", f"redis://127.0.0.1:{lasting_port('127.0.0.1')}/0")

    code = main(["doctor", "--json", "--data", str(tmp_path / "not" / "there")])

    found = json.loads(capsys.readouterr().out)
    verdicts = {each["name"]: each["verdict"] for each in found["checks"]}
    assert (code, found["is_ready"], verdicts.pop("redis")) == (1, False, "missing")
    assert "missing" not in verdicts.values()
    assert {"python", "torch", "gpu", "sandbox", "port", "disk", "shared memory", "file descriptors"} <= verdicts.keys()
