"""Who may import whom: flotilla -> services -> shared, services never each other, torch only for weights."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "rollout", "trainer", "reward", "sandbox")
TORCH = {"torch", "transformers", "safetensors"}
MAY_IMPORT_TORCH = ("services/trainer/", "services/rollout/", "shared/weights/")


def modules() -> list[Path]:
    return sorted(path for top in ("flotilla", "services", "shared") for path in (ROOT / top).rglob("*.py"))


def imported_by(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield node.module or ""


def top_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def test_there_are_modules_to_check() -> None:
    assert len(modules()) > 50


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downwards_only(path: Path) -> None:
    mine = path.relative_to(ROOT).parts
    for name in imported_by(path):
        parts = name.split(".")
        if parts[0] in {"tests", "benchmarks", "examples"}:
            pytest.fail(f"{path} imports {name}")
        if parts[0] == "flotilla":
            assert mine[0] == "flotilla", f"{path} imports {name}"
        if parts[0] == "services":
            assert mine[0] != "shared", f"{path} imports {name}"
            if mine[0] == "services":
                assert len(parts) > 1 and parts[1] == mine[1], f"{path} imports another service: {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_torch_is_imported_only_where_weights_are_computed(path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix()
    if relative.startswith(MAY_IMPORT_TORCH):
        return
    # transformers' tokenizers need no torch.
    barred = TORCH - {"transformers"} if relative == "shared/prompts.py" else TORCH
    assert not barred & {name.split(".")[0] for name in imported_by(path)}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "services/trainer/algorithms").rglob("*.py")), ids=lambda path: path.name
)
def test_algorithms_import_nothing_of_ours_but_types(path: Path) -> None:
    for name in imported_by(path):
        allowed = name.startswith(("services.trainer.algorithms", "shared.config"))
        assert allowed or name.split(".")[0] not in {"flotilla", "services", "shared"}, f"{path} imports {name}"


@pytest.mark.parametrize("package", ["services.gateway", "services.reward", "services.sandbox", "flotilla.cli"])
def test_small_images_need_no_torch(package: str) -> None:
    script = (
        "import importlib, sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'torch', 'transformers', 'safetensors'}:\n"
        "            raise ImportError(name + ' was imported')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        f"importlib.import_module('{package}.__main__')\n"
    )

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)

    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_known_here(service: str) -> None:
    assert (ROOT / "services" / service / "__main__.py").is_file()


def rooms(service: str) -> dict[str, set[str]]:
    """Find which folders of a service import which others; a module at its top is a room of its own."""
    top = ROOT / "services" / service
    found: dict[str, set[str]] = {}
    for path in top.rglob("*.py"):
        mine = path.relative_to(top).parts[0]
        for name in imported_by(path):
            parts = name.split(".")
            if parts[:2] == ["services", service] and len(parts) > 2:
                other = parts[2] if (top / parts[2]).is_dir() else f"{parts[2]}.py"
                found.setdefault(mine, set()).update({other} - {mine})
    return found


@pytest.mark.parametrize("service", ["trainer"])
def test_folders_of_a_service_import_each_other_in_one_direction(service: str) -> None:
    list(TopologicalSorter(rooms(service)).static_order())


def test_the_trainers_supervisor_needs_no_torch() -> None:
    assert not rooms("trainer")["supervisor"] - {"wire.py"}
    for path in (ROOT / "services/trainer/supervisor").rglob("*.py"):
        assert not TORCH & {name.split(".")[0] for name in imported_by(path)}


GATEWAY_ORDER = (
    "digest",
    "settings",
    "signals",
    "store",
    "events",
    "records",
    "datasets",
    "tracking",
    "preflight",
    "registry",
    "publications",
    "feeder",
    "monitoring",
    "lifecycle",
    "evaluation",
    "membership",
    "scheduler",
    "runtime",
    "state",
    "prometheus",
    "routes",
    "middleware",
    "app",
    "__main__",
)
"""The gateway's rooms (folders, and modules beside them), each above all that it may import."""


def room_of(module: str, package: str) -> str | None:
    """Name the folder or module directly inside a package that a module belongs to; None outside the package."""
    inside = module.removeprefix(package + ".")
    return inside.split(".")[0] if inside != module else None


def rooms_imported(package: str) -> dict[str, set[str]]:
    """Map each room of a package to the other rooms that it imports."""
    found: dict[str, set[str]] = {}
    folder = ROOT / package.replace(".", "/")
    for path in sorted(folder.rglob("*.py")):
        if path.parent == folder and path.name == "__init__.py":
            continue
        mine = path.relative_to(folder).parts[0].removesuffix(".py")
        names = set(imported_by(path)) | set(names_imported_by(path))
        others = {room for name in names if (room := room_of(name, package)) is not None}
        found[mine] = found.get(mine, set()) | {room for room in others if has_room(folder, room)} - {mine}
    return found


def names_imported_by(path: Path) -> Iterator[str]:
    """List ``from a.b import c`` as ``a.b.c``: ``c`` may be a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def has_room(folder: Path, room: str) -> bool:
    return (folder / room).is_dir() or (folder / f"{room}.py").is_file()


def cycle_in(imports: dict[str, set[str]]) -> list[str]:
    """List the rooms that lie on a circle of imports, or between two of them; empty if there is none."""
    left = {room: set(others) for room, others in imports.items()}
    while True:
        imported = set().union(*left.values())
        free = [room for room, others in left.items() if not others & left.keys() or room not in imported]
        if not free:
            return sorted(left)
        for room in free:
            del left[room]


def test_a_cycle_is_found() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == ["b", "c"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("package", ["services.gateway"])
def test_the_rooms_of_a_service_are_acyclic(package: str) -> None:
    assert cycle_in(rooms_imported(package)) == []


def test_the_gateways_rooms_import_only_those_below_them() -> None:
    imports = rooms_imported("services.gateway")

    assert imports.keys() == set(GATEWAY_ORDER), "a new room has its place in the order"
    place = {room: number for number, room in enumerate(GATEWAY_ORDER)}
    upwards = {(room, other) for room, others in imports.items() for other in others if place[other] > place[room]}
    assert upwards == set()
