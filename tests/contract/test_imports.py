"""Who may import whom: flotilla -> services -> shared, services never each other, torch only for weights."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "rollout", "trainer", "reward", "sandbox")
OURS = ("flotilla", "services", "shared")
TORCH = {"torch", "transformers", "safetensors"}
MAY_IMPORT_TORCH = (
    "services/trainer/",
    "services/rollout/",
    "services/reward/scoring/",
    "shared/weights/",
    "flotilla/engine_pins/sglang_cpu_site.py",  # runs in SGLang's own environment, and is imported by nothing of ours
)


@cache
def modules() -> list[Path]:
    return sorted(path for top in OURS for path in (ROOT / top).rglob("*.py"))


@cache
def import_nodes(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))


def imported_by(path: Path) -> Iterator[str]:
    for node in import_nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{path} imports relatively"
            yield node.module or ""


def test_there_are_modules_to_check() -> None:
    assert len(modules()) > 50


def test_imports_run_downwards_only() -> None:
    def is_allowed(mine: tuple[str, ...], parts: list[str]) -> bool:
        if parts[0] == "flotilla":
            return mine[0] == "flotilla"
        if parts[0] == "services":
            return mine[0] == "flotilla" or (mine[0] == "services" and parts[1:2] == [mine[1]])
        return parts[0] not in {"tests", "benchmarks", "examples"}

    assert {
        (str(path), name)
        for path in modules()
        for name in imported_by(path)
        if not is_allowed(path.relative_to(ROOT).parts, name.split("."))
    } == set()


def test_torch_is_imported_only_where_weights_are_computed() -> None:
    found = set()
    for path in modules():
        relative = path.relative_to(ROOT).as_posix()
        # transformers' tokenizers need no torch.
        barred = TORCH - {"transformers"} if relative == "shared/prompts.py" else TORCH
        if not relative.startswith(MAY_IMPORT_TORCH):
            found |= {(relative, name) for name in imported_by(path) if name.split(".")[0] in barred}

    assert found == set()


def test_algorithms_import_nothing_of_ours_but_types() -> None:
    algorithms = sorted((ROOT / "services/trainer/algorithms").rglob("*.py"))
    ours = {(path.name, name) for path in algorithms for name in imported_by(path) if name.startswith(OURS)}

    assert algorithms
    assert {each for each in ours if not each[1].startswith(("services.trainer.algorithms", "shared.config"))} == set()


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


def names_imported_by(path: Path) -> Iterator[str]:
    """List all that a module imports: ``from a.b import c`` as ``a.b`` and as ``a.b.c``, which may be a module."""
    yield from imported_by(path)
    for node in import_nodes(path):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms(package: str) -> dict[str, set[str]]:
    """Find which folders of a package import which others; a module at its top is a room of its own."""
    top = ROOT / package.replace(".", "/")
    found: dict[str, set[str]] = {}
    for path in top.rglob("*.py"):
        if path == top / "__init__.py":
            continue
        mine = path.relative_to(top).parts[0].removesuffix(".py")
        inside = (name.removeprefix(package + ".") for name in names_imported_by(path) if name.startswith(package))
        others = {name.split(".")[0] for name in inside}
        found.setdefault(mine, set()).update(other for other in others - {mine} if is_room(top, other))
    return found


@cache
def is_room(top: Path, name: str) -> bool:
    return (top / name).is_dir() or (top / f"{name}.py").is_file()


PACKAGES_OF_ROOMS = (
    *(f"services.{service}" for service in SERVICES),
    "services.rollout.engines",
    "flotilla",
    "flotilla.cli",
)


@pytest.mark.parametrize("package", PACKAGES_OF_ROOMS)
def test_folders_of_a_package_import_each_other_in_one_direction(package: str) -> None:
    list(TopologicalSorter(rooms(package)).static_order())


def test_an_engine_is_known_only_by_what_runs_around_it() -> None:
    """Decoders know no engine, the embedded engine no process, and who receives weights none of the three."""
    found = rooms("services.rollout.engines")
    assert not {"embedded", "process"} & found["decoders"]
    assert "process" not in found["embedded"]
    names = [name for path in (ROOT / "services/rollout/weights").rglob("*.py") for name in names_imported_by(path)]
    engines = {name.split(".")[3] for name in names if name.startswith("services.rollout.engines.")}
    assert engines == {"base"}


def test_modules_import_each_other_in_one_direction() -> None:
    named = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in modules()}
    imports = {name: {other for other in names_imported_by(path) if other in named} for name, path in named.items()}

    list(TopologicalSorter(imports).static_order())


def test_the_trainers_supervisor_needs_no_torch() -> None:
    assert not rooms("services.trainer")["supervisor"] - {"wire"}
    for path in (ROOT / "services/trainer/supervisor").rglob("*.py"):
        assert not TORCH & {name.split(".")[0] for name in imported_by(path)}


GATEWAY_ORDER = (
    "digest",
    "settings",
    "signals",
    "store",
    "access",
    "events",
    "records",
    "datasets",
    "tracking",
    "uploads",
    "preflight",
    "registry",
    "publications",
    "feeder",
    "monitoring",
    "lifecycle",
    "evaluation",
    "samples",
    "membership",
    "episodes",
    "scheduler",
    "runtime",
    "state",
    "prometheus",
    "routes",
    "body_limits",
    "middleware",
    "description",
    "reference_page",
    "app",
    "__main__",
)
"""The gateway's rooms, each above all that it may import."""


def test_the_gateways_rooms_import_only_those_below_them() -> None:
    imports = rooms("services.gateway")

    assert imports.keys() == set(GATEWAY_ORDER), "a new room has its place in the order"
    place = {room: number for number, room in enumerate(GATEWAY_ORDER)}
    upwards = {(room, other) for room, others in imports.items() for other in others if place[other] > place[room]}
    assert upwards == set()
