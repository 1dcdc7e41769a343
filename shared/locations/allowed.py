"""Where code, files and URLs that a spec names may be, by the operator's settings of a service.

A spec comes over REST from whoever has an operator's token, which is trust in experiments, not a shell on this machine.
"""

import json
import os
import re
import stat
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

import flotilla
from flotilla.shared.config.sections.agents import (
    AgentEnvironment,
    AgentsConfig,
    HarborConfig,
    NemoGymConfig,
    VerifiersConfig,
)
from flotilla.shared.config.sections.episodes import (
    EnvironmentEpisodesConfig,
    EpisodesConfig,
    HttpToolConfig,
    McpToolsConfig,
    PythonToolConfig,
    ToolEpisodesConfig,
)
from flotilla.shared.environment.settings import GRADER_NETWORKS, LOOPBACK, IPNetwork, networks_from
from flotilla.shared.errors import DataError, InvalidRequest, InvalidSpec

CODE_FOLDERS: Final = "FLOTILLA_CODE_FOLDERS"
DATA_FOLDERS: Final = "FLOTILLA_DATA_FOLDERS"
CHECKPOINT_URLS: Final = "FLOTILLA_CHECKPOINT_URLS"
GRANTS: Final = "code-files"
"""File in the data directory of a local fleet: code that was named in a spec file which its user started."""
CODE: Final = re.compile(r"[/~].*\.py:\w+", re.DOTALL)
"""``file.py:name``; what a spec names is absolute by the time that it is sent."""
COUNTS: Final = frozenset({"parallel", "seconds"})
"""Keys of an environment of agents that say nothing of what is started."""
PROGRAM: Final = re.compile(r"[\w@%+=:,./\" $-]+", re.ASCII)
"""A shell's command that starts one program with arguments, in which variables may stand, and does nothing else."""
STEP: Final = re.compile(r"@\d+$")
"""Of a checkpoint that is named with its step."""
LOCAL: Final = re.compile(r"(?:file:(?://)?|sqlite:///)?((?!databricks|uc)[^:]+)", re.DOTALL)
"""A path, or a URL of MLflow's that is one."""
REMOTE_PROTOCOLS: Final = frozenset(
    {"http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "hf"}
)
"""Object stores, and the web. Not: other machines' shells, files by another name, archives and caches around a URL."""


@dataclass(frozen=True, slots=True)
class Places:
    """What the operator allows.

    Attributes:
        code: folders, and files, with code that a spec may name; those below a folder count, but for what is installed.
        data: folders of files with rows; None: any that this process may read.
        networks: that are not public, and that a URL of rows or of a tool may be in.
        checkpoint_urls: whose folders, and those below them, checkpoints may be uploaded to and begun from.
        refuse: called with what is opened, links not yet followed; raises where that is another owner's.
        grants: a file that lists further files with code, commands, and where trackers may write as commands
            ``write PATH`` and checkpoints as ``checkpoints URL``, in JSON, one per line; None: there is none.
    """

    code: tuple[Path, ...] = ()
    data: tuple[Path, ...] | None = None
    networks: tuple[IPNetwork, ...] = LOOPBACK
    checkpoint_urls: tuple[str, ...] = ()
    grants: Path | None = None
    refuse: Callable[[str], None] | None = None

    def check_code(self, reference: str, field: str) -> None:
        """Check that the file of ``file.py:name`` may be run.

        Raises:
            InvalidSpec: it is not allowed; the detail names the setting.
        """
        path = Path(reference.rpartition(":")[0]).expanduser().resolve()
        if path in self._granted() or path in map(_resolved, self.code):
            return
        below = any(path.is_relative_to(folder) for folder in map(_resolved, self.code))
        if not below or any(path.is_relative_to(folder) for folder in _installed()):
            why = "is installed, and no code of yours" if below else "is in no folder that this fleet runs code from"
            raise InvalidSpec(
                f"{field}: {path} {why}: name its folder in {CODE_FOLDERS} of gateway, rewards and rollouts, or start "
                "the spec's file with `flotilla run` or `flotilla start` on the fleet's own machine",
                errors=[{"path": field, "value": reference, "allowed": f"code in {CODE_FOLDERS}"}],
            )

    def check_command(self, command: Sequence[str], field: str) -> None:
        """Check that a program may be started with any arguments.

        Raises:
            InvalidSpec: it is not allowed; the detail names the setting.
        """
        if not self._names(command[0]) and _line_of(command) not in self._granted_lines():
            raise _no_program(command[0], field)

    def check_environment(self, environment: AgentEnvironment) -> None:
        """Check that the agent of an environment may be started: as it was granted, or made of what the operator named.

        Raises:
            InvalidSpec: it is not allowed; the detail names the setting.
        """
        if isinstance(environment, NemoGymConfig) or not _lines_of(environment).isdisjoint(self._granted_lines()):
            return
        if isinstance(environment, VerifiersConfig):
            # As it is written: many environments' interpreters are links to one and the same file.
            if Path(os.path.abspath(environment.python)) not in self.code:  # noqa: PTH100  links are kept
                raise _no_program(environment.python, f"{AGENT}.python")
            if environment.is_file:
                self.check_code(f"{environment.taskset}:", f"{AGENT}.taskset")
            return
        program = environment.harness.split()[:1]
        if not PROGRAM.fullmatch(environment.harness) or not program or not self._names(program[0]):
            raise _no_program(environment.harness, f"{AGENT}.harness")
        self.check_code(f"{environment.tasks}:", f"{AGENT}.tasks")
        for number, path in enumerate(environment.readable):
            if not any(Path(path).resolve().is_relative_to(each) for each in map(_resolved, self.code)):
                raise _not_readable(path, f"{AGENT}.readable.{number}")
        if environment.secrets:
            raise _not_readable(f"the variable {environment.secrets[0]}", f"{AGENT}.secrets.0")

    def _names(self, program: str) -> bool:
        return Path(program).is_absolute() and Path(program).resolve() in map(_resolved, self.code)

    def check_file(self, path: str) -> None:
        """Check that a file or folder of rows may be read, wherever links lead.

        Raises:
            DataError: it is not allowed; the detail names the setting.
        """
        resolved = Path(path).resolve()
        if self.data is not None and not any(resolved.is_relative_to(each) for each in map(_resolved, self.data)):
            raise DataError(
                f"{path} is in no folder that this fleet reads data from: name its folder in {DATA_FOLDERS} of the "
                "gateway",
                path=path,
            )
        self.check_owner(path)

    def check_owner(self, path: str) -> None:
        """Check that a file or folder is not another owner's, wherever links lead.

        Raises:
            DataError: it is.
        """
        if self.refuse is not None:
            self.refuse(path)

    def check_written(self, path: str, field: str) -> None:
        """Check that a tracker may write below a folder, wherever links lead.

        Raises:
            InvalidSpec: it is not allowed; the detail names the setting.
        """
        resolved = Path(path).expanduser().resolve()
        is_below = any(resolved.is_relative_to(each) for each in map(_resolved, self.data or ()))
        if not is_below and _line_of(("write", str(resolved))) not in self._granted_lines():
            raise InvalidSpec(
                f"{field}: {path} is in no folder that this fleet writes for a spec: leave it out, to write into the "
                f"experiment's own directory, name its folder in {DATA_FOLDERS} of the gateway, or start the spec's "
                "file with `flotilla run` or `flotilla start` on the fleet's own machine",
                errors=[{"path": field, "value": path, "allowed": f"a folder in {DATA_FOLDERS}"}],
            )

    def check_checkpoint_url(self, url: str, field: str) -> None:
        """Check that checkpoints may be written to a URL, and read from it.

        Raises:
            InvalidSpec: they are not allowed; the detail names the setting.
        """
        is_allowed = any(_is_below(url, each) for each in self.checkpoint_urls)
        if not is_allowed and _line_of(("checkpoints", url)) not in self._granted_lines():
            raise InvalidSpec(
                f"{field}: {url} is below no URL that this fleet keeps checkpoints at: name one in {CHECKPOINT_URLS} "
                "of the gateway, or start the spec's file with `flotilla run` or `flotilla start` on the fleet's own "
                "machine",
                errors=[{"path": field, "value": url, "allowed": f"a URL in {CHECKPOINT_URLS}"}],
            )

    def check_protocol(self, url: str) -> str:
        """Return the protocol of a URL of rows.

        Raises:
            DataError: it is none that a spec may name.
        """
        protocol, _, rest = url.partition("://")
        if protocol not in REMOTE_PROTOCOLS or "://" in rest or (protocol not in {"http", "https"} and "::" in url):
            known = ", ".join(sorted(REMOTE_PROTOCOLS))
            raise DataError(f"cannot read {url}: a URL of rows has one of the protocols {known}", path=url)
        return protocol

    def _granted(self) -> frozenset[Path]:
        return frozenset(map(Path, self._granted_lines()))

    def _granted_lines(self) -> frozenset[str]:
        if self.grants is None:
            return frozenset()
        try:
            with self.grants.open(encoding="utf-8") as file:
                status = os.fstat(file.fileno())
                # Another user who may write it would decide what is run here.
                if status.st_uid not in {0, os.geteuid()} or stat.S_IMODE(status.st_mode) & 0o022:
                    return frozenset()
                return frozenset(line.rstrip("\n") for line in file)
        except OSError:
            return frozenset()


def code_of(document: Any, field: str = "") -> dict[str, str]:
    """List what names code in a file, wherever it is in a spec, by its dotted field."""
    if isinstance(document, str):
        return {field: document} if CODE.fullmatch(document) else {}
    if isinstance(document, Mapping):
        items = list(document.items())
    else:
        items = list(enumerate(document)) if isinstance(document, list | tuple) else []
    return {
        name: code
        for key, value in items
        for name, code in code_of(value, f"{field}.{key}" if field else str(key)).items()
    }


def commands_of(document: Any) -> list[tuple[str, ...]]:
    """List the commands of MCP servers, wherever they are in a spec."""
    if not isinstance(document, Mapping):
        items = document if isinstance(document, list | tuple) else ()
        return [found for each in items for found in commands_of(each)]
    command = document.get("command") if document.get("kind") == "mcp" else None
    own = [tuple(map(str, command))] if isinstance(command, list | tuple) and command else []
    return own + [found for each in document.values() for found in commands_of(each)]


def written_of(document: Any) -> dict[str, str]:
    """List the folders and files that the trackers of a spec write, by their field."""
    tracking = document.get("tracking") if isinstance(document, Mapping) else None
    trackers = tracking.get("trackers") if isinstance(tracking, Mapping) else None
    found = {}
    for number, tracker in enumerate(trackers if isinstance(trackers, list | tuple) else ()):
        for name in ("directory", "tracking_uri"):
            given = tracker.get(name) if isinstance(tracker, Mapping) else None
            local = LOCAL.fullmatch(given) if isinstance(given, str) else None
            if local is not None:
                found[f"tracking.trackers.{number}.{name}"] = local[1]
    return found


def checkpoint_urls_of(document: Any) -> dict[str, str]:
    """List the URLs at which a spec keeps checkpoints, or begins from one, by their field."""
    section = document.get("checkpoint") if isinstance(document, Mapping) else None
    found = {}
    for name in ("upload_to", "resume_from"):
        given = section.get(name) if isinstance(section, Mapping) else None
        if isinstance(given, str) and "://" in given:
            found[f"checkpoint.{name}"] = STEP.sub("", given)
    return found


def environments_of(document: Any) -> list[AgentEnvironment]:
    """List the environment of agents that a spec names; none where it names only a part of one, or a wrong one."""
    given = document
    for name in AGENT.split("."):
        given = given.get(name) if isinstance(given, Mapping) else None
    try:
        environment = AgentsConfig.model_validate({"environment": given}).environment
    except ValidationError:
        return []
    return [] if environment is None else [environment]


def _no_program(program: str, field: str) -> InvalidSpec:
    return InvalidSpec(
        f"{field}: the program {program!r} is none that this fleet starts for a spec: name the file itself, "
        f"by its absolute path, in {CODE_FOLDERS} of gateway and rollouts, or start the spec's file with "
        "`flotilla run` or `flotilla start`, or fork with `flotilla fork`, on the fleet's own machine",
        errors=[{"path": field, "value": program, "allowed": f"a program in {CODE_FOLDERS}"}],
    )


def _not_readable(what: str, field: str) -> InvalidSpec:
    return InvalidSpec(
        f"{field}: {what} is nothing that programs of a spec may read: leave it out, let it be below a path in "
        f"{CODE_FOLDERS} of gateway and rollouts, or start the spec's file with `flotilla run` or `flotilla start`, "
        "or fork with `flotilla fork`, on the fleet's own machine",
        errors=[{"path": field, "value": what, "allowed": f"a path in {CODE_FOLDERS}"}],
    )


def _is_below(url: str, allowed: str) -> bool:
    """Return whether a URL is another one or below it, without any way out; files count by where links lead."""
    scheme, _, rest = url.partition("://")
    if "::" in url or not set(rest.split("/")).isdisjoint({"..", "."}):
        return False
    if scheme in {"file", "local"}:
        own, _, path = allowed.partition("://")
        return own == scheme and Path(rest).resolve().is_relative_to(Path(path).resolve())
    return f"{url.rstrip('/')}/".startswith(f"{allowed.rstrip('/')}/")


def _line_of(command: Sequence[str]) -> str:
    """Write a command as a line of the grants, which no absolute path is equal to."""
    return json.dumps(list(command))


def _line_of_environment(environment: AgentEnvironment) -> str:
    # Without defaults: it stays the same in a release that has more of them.
    return _line_of(("environment", environment.model_dump_json(exclude_defaults=True, exclude=set(COUNTS))))


def _lines_of(environment: AgentEnvironment) -> set[str]:
    """List the lines by which an environment is granted; earlier releases wrote the whole of it."""
    whole = _line_of(("environment", environment.model_dump_json(exclude_defaults=True)))
    return {_line_of_environment(environment), whole}


def read_places(values: Mapping[str, str], data: Path) -> Places:
    """Read them from a service's environment.

    Args:
        data: the service's data directory.

    Raises:
        InvalidRequest: a variable is malformed.
    """
    folders = _folders(values, DATA_FOLDERS)
    return Places(
        code=_folders(values, CODE_FOLDERS) or (),
        data=folders,
        networks=networks_from(values, GRADER_NETWORKS, LOOPBACK),
        checkpoint_urls=_urls(values),
        grants=data.resolve() / GRANTS,
    )


def grant_code(data: Path, document: Any) -> None:
    """Let the local fleet of a data directory run the code and the commands that a spec, or a part of one, names, and
    write where its trackers do.

    Who may write there is the fleet's own user.
    """
    references = code_of(document).values()
    wanted = [str(Path(each.rpartition(":")[0]).expanduser().resolve()) for each in references]
    wanted += map(_line_of, commands_of(document))
    wanted += map(_line_of_environment, environments_of(document))
    wanted += [_line_of(("write", str(Path(each).expanduser().resolve()))) for each in written_of(document).values()]
    wanted += [_line_of(("checkpoints", each)) for each in checkpoint_urls_of(document).values()]
    path = data / GRANTS
    known = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    new = [each for each in dict.fromkeys(wanted) if each not in known and "\n" not in each]
    if new:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8") as file:
            file.write("".join(f"{each}\n" for each in new))


def _urls(values: Mapping[str, str]) -> tuple[str, ...]:
    found = tuple(values.get(CHECKPOINT_URLS, "").replace(",", " ").split())
    wrong = next((each for each in found if not each.partition("://")[1] or "::" in each), None)
    if wrong is not None:
        raise InvalidRequest(f"{CHECKPOINT_URLS} must be URLs with spaces or commas between them, got {wrong!r}")
    return found


def _folders(values: Mapping[str, str], name: str) -> tuple[Path, ...] | None:
    text = values.get(name, "").strip()
    if not text:
        return None
    folders = tuple(Path(each) for each in text.split(os.pathsep) if each)
    wrong = next((each for each in folders if not each.is_absolute()), None)
    if wrong is not None:
        raise InvalidRequest(f"{name} must be absolute paths with {os.pathsep!r} between them, got {str(wrong)!r}")
    return folders


def _resolved(path: Path) -> Path:
    return path.resolve()


def _installed() -> list[Path]:
    """List where packages are, this one included: what is there has names that do anything, such as ``Popen``."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {Path(sysconfig.get_path(name)).resolve() for name in names}
    shared = Path(__file__).resolve().parents[1]
    return [*folders, Path(flotilla.__file__).resolve().parent, shared, shared.with_name("services")]


FIELD, AGENT = "rollout.episodes", "rollout.agents.environment"


def files_of(config: EpisodesConfig) -> dict[str, str]:
    """List the files that episodes name, by their dotted field; of ``file.py:name`` the file."""
    files: dict[str, str] = {}
    if isinstance(config, EnvironmentEpisodesConfig):
        for number, each in enumerate(config.environments):
            if each.is_code:
                files[f"{FIELD}.environments.{number}.environment"] = each.environment.rpartition(":")[0]
    elif isinstance(config, ToolEpisodesConfig):
        for number, tool in enumerate(config.tools):
            if isinstance(tool, PythonToolConfig):
                files[f"{FIELD}.tools.{number}.path"] = tool.path.rpartition(":")[0]
            elif isinstance(tool, HttpToolConfig) and isinstance(tool.tool_schema, str):
                files[f"{FIELD}.tools.{number}.tool_schema"] = tool.tool_schema
    return files


def check_episodes(config: EpisodesConfig, places: Places) -> None:
    """Check all of it, before any of it is read or run.

    Raises:
        InvalidSpec, DataError: something is where the operator does not allow it; the detail says what to set.
    """
    for field, file in files_of(config).items():
        if field.endswith(".tool_schema"):
            places.check_file(file)
        else:
            places.check_code(f"{file}:", field)
    for number, tool in enumerate(config.tools if isinstance(config, ToolEpisodesConfig) else ()):
        if isinstance(tool, McpToolsConfig) and tool.command is not None:
            places.check_command(tool.command, f"{FIELD}.tools.{number}.command")


def paths_of_agents(config: AgentsConfig | None) -> dict[str, str]:
    """List the paths that an environment of agents names, by their dotted field."""
    environment = None if config is None else config.environment
    if isinstance(environment, HarborConfig):
        readable = {f"{AGENT}.readable.{number}": each for number, each in enumerate(environment.readable)}
        return {f"{AGENT}.tasks": environment.tasks} | readable
    if isinstance(environment, VerifiersConfig):
        file = {f"{AGENT}.taskset": environment.taskset} if environment.is_file else {}
        return {f"{AGENT}.python": environment.python} | file
    return {}


def check_agents(config: AgentsConfig | None, places: Places) -> None:
    """Check the agent that rollouts would start, before anything of it is read or run.

    Raises:
        InvalidSpec: something is where the operator does not allow it; the detail says what to set.
    """
    if config is not None and config.environment is not None:
        places.check_environment(config.environment)
