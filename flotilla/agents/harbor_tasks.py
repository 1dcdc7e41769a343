"""Harbor's task folders: ``task.toml``, ``instruction.md``, ``environment/``, ``tests/``, read without its package.

A task is played in a box on this machine (``box.py``), whose programs are the machine's: of its Dockerfile the files,
the variables and the working directory are taken. What a box cannot do is refused with the task's name.

Source: Harbor 0.26, ``models/task/config.py`` and ``models/task/paths.py``.
"""

import json
import os
import posixpath
import re
import shlex
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from string import Template

from pydantic import Field, ValidationError

from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.wire import TolerantWire

CONFIG = "task.toml"
WORKDIR = PurePosixPath("/app")
"""Where commands run if neither ``task.toml`` nor a Dockerfile says."""
CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
AS_DONE = frozenset({"from", "cmd", "entrypoint", "label", "expose", "maintainer", "stopsignal", "volume"})
"""Instructions of a Dockerfile that do not affect files, variables or the working directory."""


class _Phase(TolerantWire):
    timeout_sec: float | None = Field(None, gt=0)
    user: str | int | None = None
    network_mode: str | None = None


class _Verifier(_Phase):
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: str | None = None
    environment: object = None
    collect: tuple[object, ...] = ()


class _Environment(TolerantWire):
    docker_image: str | None = None
    os: str = "linux"
    workdir: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    gpus: int | None = None
    tpu: object = None
    mcp_servers: tuple[object, ...] = ()
    skills_dir: str | None = None
    healthcheck: object = None
    network_mode: str | None = None
    allow_internet: bool | None = None


class _Config(TolerantWire):
    agent: _Phase = _Phase()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()
    steps: tuple[object, ...] = ()

    @property
    def modes(self) -> set[str]:
        """Which networks agent and tests have."""
        place = self.environment
        usual = place.network_mode or ("no-network" if place.allow_internet is False else "public")
        return {self.agent.network_mode or usual, self.verifier.network_mode or usual}


@dataclass
class Image:
    """What a Dockerfile makes of an empty root.

    Attributes:
        workdir: where commands run.
        variables: of the environment.
        copies: files and folders of the task, and where they go; in order.
    """

    workdir: PurePosixPath = WORKDIR
    variables: dict[str, str] = field(default_factory=dict)
    copies: list[tuple[Path, PurePosixPath]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HarborTask:
    """One task folder.

    Attributes:
        name: of its folder.
        tests: folder with ``test.sh``, which the agent never sees.
        instruction: for the agent.
        agent_seconds: time of the agent; None where the task sets none.
        verifier_seconds: time of the tests.
        verifier_variables: of the tests' environment.
        is_closed: whether it is played without a network but for the policy.
    """

    name: str
    tests: Path
    instruction: str
    image: Image
    agent_seconds: float | None
    verifier_seconds: float
    verifier_variables: Mapping[str, str]
    is_closed: bool = False


def task_folders(path: Path) -> dict[str, Path]:
    """Find the task folders of a path by name: itself, or those in it.

    Raises:
        InvalidSpec: there is none.
    """
    found = [path] if (path / CONFIG).is_file() else sorted(each.parent for each in path.glob(f"*/{CONFIG}"))
    if not found:
        raise InvalidSpec(f"{path} is no Harbor task and has none in it: a task is a folder with {CONFIG}")
    return {each.resolve().name: each.resolve() for each in found}


def read_task(folder: Path, *, skip_run: bool = False, readable: Collection[str] = ()) -> HarborTask:
    """Read a task.

    Args:
        folder: of it.
        skip_run: take what ``RUN`` would install as there already.
        readable: variables of this process's environment that a task may name: its text is not trusted.

    Raises:
        InvalidSpec: it is none, or needs what a box has not.
    """
    try:
        config = _Config.model_validate(tomllib.loads((folder / CONFIG).read_text(encoding="utf-8")))
        lines = (folder / "instruction.md").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise InvalidSpec(f"Harbor task {folder.name}: {error}") from error
    wants = [what for what, is_so in _wants(config, folder) if is_so]
    if wants:
        raise InvalidSpec(
            f"Harbor task {folder.name} asks for {', '.join(wants)}, which a box on this machine has not: play it with "
            "Harbor itself, or leave it out"
        )
    while lines and (CANARY.match(lines[0].strip()) or not lines[0].strip()):
        lines.pop(0)
    image = read_image(folder / "environment", skip_run=skip_run)
    if config.environment.workdir:
        image.workdir = PurePosixPath("/") / config.environment.workdir
    image.variables |= _resolved(folder.name, config.environment.env, readable)
    return HarborTask(
        folder.name,
        folder / "tests",
        "\n".join(lines).strip(),
        image,
        config.agent.timeout_sec,
        config.verifier.timeout_sec or 600.0,
        _resolved(folder.name, config.verifier.env, readable),
        "no-network" in config.modes,
    )


def _wants(config: _Config, folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield what a task may ask for and a box does not do, and whether this one does."""
    asked, environment = config.verifier, folder / "environment"
    place = config.environment
    yield "several steps", bool(config.steps)
    yield f"the system {place.os}", place.os.lower() != "linux"
    yield "an image (environment.docker_image)", place.docker_image is not None
    yield "services (docker-compose)", any(environment.glob("docker-compose.y*ml"))
    yield "accelerators", bool(place.gpus) or place.tpu is not None
    yield "MCP servers", bool(place.mcp_servers)
    yield "skills", place.skills_dir is not None
    yield "a healthcheck", place.healthcheck is not None
    yield "a user that is not root", not {config.agent.user, asked.user} <= {None, "root", 0}
    modes = sorted(config.modes)
    yield f"the network {' beside '.join(modes)}", modes not in (["public"], ["no-network"])
    yield "tests in an environment of their own", asked.environment is not None or asked.environment_mode == "separate"
    yield "files of services (verifier.collect)", bool(asked.collect)
    yield "tests without tests/test.sh", not (folder / "tests" / "test.sh").is_file()


def _resolved(name: str, variables: Mapping[str, str], readable: Collection[str]) -> dict[str, str]:
    """Put the values of this process's environment where a task names them, as ``${NAME}`` or ``${NAME:-default}``."""

    def value(found: re.Match[str]) -> str:
        given = os.environ.get(found[1], found[2]) if found[1] in readable else found[2]
        if given is None:
            raise InvalidSpec(
                f"Harbor task {name} asks for the environment variable {found[1]}: `--secret {found[1]}` lets tasks "
                "read it" + ("" if found[1] in os.environ else ", and it is not set")
            )
        return given

    for key in variables:
        if not NAME.fullmatch(key):
            raise InvalidSpec(f"Harbor task {name} sets the environment variable {key!r}, which is no name")
    return {key: VARIABLE.sub(value, text) for key, text in variables.items()}


def read_image(environment: Path, *, skip_run: bool = False) -> Image:
    """Read a Dockerfile, as far as it places files and sets variables; a folder without one is an empty image.

    Raises:
        InvalidSpec: it does more.
    """
    image, dockerfile = Image(), environment / "Dockerfile"
    if not dockerfile.is_file():
        return image
    for number, line in _instructions(dockerfile.read_text(encoding="utf-8")):
        name, _, rest = line.partition(" ")
        where = f"{environment.parent.name}/environment/Dockerfile:{number}"
        try:
            _take(image, name.lower(), Template(rest.strip()).safe_substitute(image.variables), environment, skip_run)
        except (OSError, ValueError) as error:
            raise InvalidSpec(f"{where}: {name}: {error}") from error
    return image


def _instructions(text: str) -> Iterator[tuple[int, str]]:
    """Yield the instructions of a Dockerfile with the lines that they begin in."""
    begun, pieces = 0, list[str]()
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        begun = begun or number
        pieces.append(line.removesuffix("\\").strip())
        if not line.endswith("\\"):
            yield begun, " ".join(pieces)
            begun, pieces = 0, []


def _take(image: Image, name: str, rest: str, environment: Path, skip_run: bool) -> None:
    if name in AS_DONE or (name == "run" and skip_run) or (name == "user" and rest in {"root", "0"}):
        return
    if name == "workdir":
        image.workdir = image.workdir / rest
    elif name == "env":
        words = shlex.split(rest)
        if not words:
            raise ValueError("names a variable and its value")
        pairs = [word.split("=", 1) for word in words] if "=" in words[0] else [[words[0], " ".join(words[1:])]]
        for key, _ in pairs:
            if not NAME.fullmatch(key):
                raise ValueError(f"{key!r} is no name of a variable")
        image.variables |= dict(pairs)
    elif name in {"copy", "add"}:
        image.copies += _copies(image.workdir, rest, environment)
    elif name == "run":
        raise ValueError("a box runs nothing to make an image; --skip-run where this machine has what it installs")
    else:
        raise ValueError("is not done in a box")


def _copies(workdir: PurePosixPath, rest: str, environment: Path) -> Iterator[tuple[Path, PurePosixPath]]:
    """Yield what an instruction copies, and where to: folders by what is in them, as Docker does."""
    flags = []
    while rest.startswith("--"):
        flag, _, rest = rest.partition(" ")
        flags.append(flag)
        rest = rest.lstrip()
    if any(not flag.startswith(("--chown=", "--chmod=", "--link")) for flag in flags) or "<<" in rest:
        raise ValueError("copies from the task's own environment folder alone")
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    if len(words) < 2 or not all(isinstance(word, str) for word in words):
        raise ValueError("names what is copied, and where to")
    *sources, target = words
    is_folder = target.endswith("/") or target in {".", "./"} or len(sources) > 1
    for source in sources:
        for path in _found(environment, source):
            place = workdir / target / path.name if path.is_file() and is_folder else workdir / target
            # As Docker does: nothing is above the root.
            yield path, PurePosixPath("/" + posixpath.normpath(place).lstrip("/"))


def _found(environment: Path, source: str) -> list[Path]:
    """Find what a copy's source names in the task's environment folder."""
    if source in {".", "./"}:
        return [environment]
    found = sorted(environment.glob(source.removeprefix("./").lstrip("/")))
    if not found:
        raise ValueError(f"there is no {source}")
    if not all(path.resolve().is_relative_to(environment.resolve()) for path in found):
        raise ValueError(f"{source} is outside of the task")
    return found
