"""Processes are started in ``children/``, by the sandbox and by the command line; others use what ``children/`` has."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from flotilla.shared.children.spawning import spawn

ROOT = Path(__file__).parents[3]
ROOMS = ("flotilla/", "services/sandbox/", "shared/children/")
SPAWNING = {
    "subprocess": {"Popen", "run", "call", "check_call", "check_output"},
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell"},
    "os": {"fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "popen"},
    "multiprocessing": {"Process", "Pool", "get_context"},
    "loop": {"subprocess_exec", "subprocess_shell"},
}


def modules() -> Iterator[Path]:
    for top in ("flotilla", "services", "shared"):
        yield from (ROOT / top).rglob("*.py")


def spawns(path: Path) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.attr in SPAWNING.get(node.value.id, ())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )


def test_no_module_elsewhere_starts_processes_by_itself() -> None:
    # Links lead from flotilla/ to the other folders; each module counts once, by its real place.
    names = {path.resolve().relative_to(ROOT).as_posix(): path for path in modules()}
    found = {name for name, path in names.items() if spawns(path)}

    assert "shared/children/spawning.py" in found, "what is searched for is found"
    assert {name for name in found if not name.startswith(ROOMS)} == set()


async def test_what_is_written_to_a_child_that_has_gone_is_no_error() -> None:
    child = await spawn([sys.executable, "-c", "pass"], max_line_bytes=100)
    await child.ended()
    await child.end()

    child.write(b"hello\n")
