"""Commands against a gateway that runs: what they print is what it answers, read through the client."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from flotilla.services.gateway.settings import GatewaySettings
from tests.integration.gateway.fleet import (
    TOKEN,
    ScriptedReward,
    ScriptedRollout,
    ScriptedTrainer,
    a_fleet,
    a_gateway,
    a_spec,
)


class Shell:
    """Types commands for one gateway."""

    def __init__(self, url: str, folder: Path) -> None:
        self._environment = {"FLOTILLA_GATEWAY_URL": url, "FLOTILLA_TOKEN": TOKEN, "PATH": "/usr/bin:/bin"}
        self._folder = folder

    async def type(self, *words: str, code: int = 0) -> str:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "flotilla", *words),
            cwd=self._folder,
            env=self._environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, complaint = await process.communicate()
        assert process.returncode == code, complaint.decode()
        return (said or complaint).decode()

    async def asked(self, *words: str, code: int = 0) -> Any:
        return json.loads(await self.type(*words, "--json", code=code))


async def test_an_experiment_is_started_followed_listed_and_deleted(tmp_path: Path, redis_url: str) -> None:
    spec = tmp_path / "experiment.yaml"
    spec.write_text(yaml.safe_dump(a_spec(tmp_path)))
    settings = GatewaySettings(token=TOKEN, redis_url=redis_url, data=tmp_path / "data")
    async with (
        a_gateway(settings) as (url, _),
        a_fleet(url, redis_url, ScriptedRollout, ScriptedReward, ScriptedTrainer),
    ):
        shell = Shell(url, tmp_path)

        started = await shell.asked("start", str(spec), "--set", "optimisation.steps=2", "--set", "name=mine")
        lines = (await shell.type("watch", "mine", "--json")).splitlines()
        listed, status, ledger, summary = await asyncio.gather(
            shell.asked("ls"), shell.asked("status"), shell.asked("ledger", "mine"), shell.asked("report", "mine")
        )
        table = await shell.type("ledger", "mine")
        refused = await shell.type("pause", "mine", code=5)
        made = await shell.asked("token", "create", "ci", "--scope", "reader")
        tokens = await shell.asked("token", "list")
        await shell.type("token", "revoke", "ci")
        await shell.type("delete", "mine")

        last = json.loads(lines[-1])
        assert (last["id"], last["state"], last["step"]) == (started["id"], "completed", 2)
        assert [(each["id"], each["is_active"]) for each in listed] == [(started["id"], False)]
        assert {each["kind"] for each in status["services"]} == {"rollout", "reward", "trainer"}
        assert status["gateway"]["address"] == url and status["experiments"][0]["total_steps"] == 2
        assert (ledger["train"]["issued"], ledger["train"]["trained"], ledger["train"]["balanced"]) == (4, 4, True)
        assert (summary["status"], summary["ledger"]["trained"]) == ("completed", 4)
        assert "waiting: tasks" in table and "tokens: generated" in table
        assert "completed" in refused
        assert made["scope"] == "reader" and [each["name"] for each in tokens] == ["ci"]
        assert await shell.asked("ls") == [] and await shell.asked("token", "list") == []
