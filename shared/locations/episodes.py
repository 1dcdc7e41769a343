"""What episodes name is where the operator allows it: code in files, programs, schemas."""

from flotilla.shared.config.sections.episodes import (
    EnvironmentEpisodesConfig,
    EpisodesConfig,
    HttpToolConfig,
    McpToolsConfig,
    PythonToolConfig,
    ToolEpisodesConfig,
)
from flotilla.shared.locations.allowed import Places

FIELD = "rollout.episodes"


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
