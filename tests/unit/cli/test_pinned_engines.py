"""An engine's environment is whole, or not there."""

import asyncio
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from flotilla.cli.command_line import build_parser
from flotilla.pinned_engines import ENGINES, PINS, TORCH, engine_named, install_engine, installed_version
from flotilla.shared.errors import Conflict, InvalidRequest

ROOT = Path(__file__).parents[3]


class MemoryPip:
    """Makes what venv and pip would make, and ends at one of their calls if it is told to."""

    def __init__(self, fails_at: int | None = None, error: BaseException | None = None) -> None:
        self.commands: list[list[str]] = []
        self._fails_at, self._error = fails_at, error

    async def __call__(self, command: Sequence[str]) -> None:
        self.commands.append(list(command))
        if "venv" in command:
            made = Path(command[-1])
            packages = made / "lib" / "python3.11" / "site-packages"
            packages.mkdir(parents=True)
            (made / "bin").mkdir()
            (made / "bin" / "python").symlink_to("/usr/bin/python3")
            (made / "bin" / "tool").write_text(f"#!{made}/bin/python\n")
        else:
            packages = Path(command[0]).parents[1] / "lib" / "python3.11" / "site-packages"
            for requirement in command:
                if "==" in requirement and "install" in command:
                    (packages / f"{requirement.replace('-', '_').replace('==', '-')}.dist-info").mkdir(exist_ok=True)
        if len(self.commands) - 1 == self._fails_at and self._error is not None:
            raise self._error


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", sorted(ENGINES))
async def test_an_environment_is_made_once(tmp_path: Path, name: str, device: str) -> None:
    pip, said, path = MemoryPip(), list[str](), tmp_path / "new" / "engine"

    assert await install_engine(ENGINES[name], path, device, pip, said.append)
    assert not await install_engine(ENGINES[name], path, device, pip, said.append)

    assert installed_version(path, ENGINES[name].distributions[device]) == ENGINES[name].version
    assert (path / "bin" / "tool").read_text() == f"#!{path}/bin/python\n"
    assert [each.name for each in path.parent.iterdir()] == ["engine"]
    assert len(said) == len(pip.commands) > 1
    [packages] = path.glob("lib/*/site-packages")
    site = ENGINES[name].site if device == "cpu" else ()
    assert {each.name for each in packages.glob("*.py")} == set(site)
    imported = [line for file in packages.glob("*.pth") for line in file.read_text().splitlines()]
    assert imported == [f"import {each.removesuffix('.py')}" for each in site]


@pytest.mark.parametrize("error", [asyncio.CancelledError(), subprocess.CalledProcessError(1, ["pip"])])
@pytest.mark.parametrize("fails_at", range(4))
async def test_what_is_interrupted_leaves_nothing(tmp_path: Path, fails_at: int, error: BaseException) -> None:
    with pytest.raises(type(error)):
        await install_engine(
            ENGINES["sglang"], tmp_path / "engine", "cpu", MemoryPip(fails_at, error), lambda _text: None
        )

    assert list(tmp_path.iterdir()) == []


async def test_what_is_there_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    old = tmp_path / "old" / "lib" / "python3.11" / "site-packages" / "sglang-0.4.0.dist-info"
    old.mkdir(parents=True)

    for path, found in ((tmp_path, "no environment"), (tmp_path / "old", "sglang 0.4.0")):
        with pytest.raises(Conflict, match=f"{found}.*another --path"):
            await install_engine(ENGINES["sglang"], path, "cuda", MemoryPip(), lambda _text: None)

    assert (tmp_path / "file").read_text() == "mine"
    assert old.exists()


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="one of sglang, vllm"):
        engine_named("tgi")


def test_extras_constraints_and_commands_name_the_same_versions() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]

    for name, engine in ENGINES.items():
        assert extras[name] == [f"{engine.distributions['cuda']}=={engine.version}"]
        assert any(f"{engine.distributions['cpu']}=={engine.version}" in call for call in engine.on_cpus)
        arguments = build_parser().parse_args(["engine", "install", name])
        assert (arguments.engine, arguments.device, arguments.path) == (name, "cuda", None)
    assert TORCH in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert (PINS / "sglang_cpu.txt").is_file()
