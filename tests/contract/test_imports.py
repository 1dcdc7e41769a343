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
TORCH = {"torch", "transformers", "safetensors"}
MAY_IMPORT_TORCH = (
    "services/trainer/",
    "services/rollout/",
    "services/reward/scoring/",
    "shared/weights/",
    "shared/models/routers.py",  # records what experts an engine chose, and tells the trainer's model
    "shared/vision/tower.py",  # computes images for engine and trainer alike, which both have torch
    "flotilla/engine_pins/sglang_cpu_site.py",  # runs in SGLang's own environment, and is imported by nothing of ours
    "flotilla/engine_pins/torchvision_cpu_site.py",  # the same, and in vLLM's
)


@cache
def modules() -> dict[str, Path]:
    """Find every module by its import name; ``services`` and ``shared`` are linked into ``flotilla``."""
    found = {}
    for top in ("flotilla", "services", "shared"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[:2] in {("flotilla", "services"), ("flotilla", "shared")}:
                continue
            parts = parts if top == "flotilla" else ("flotilla", *parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def import_nodes(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))


def imported_by(path: Path) -> Iterator[str]:
    for node in import_nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.level == 0:
            yield node.module or ""


def names_imported_by(path: Path) -> Iterator[str]:
    """List all that a module imports: ``from a.b import c`` as ``a.b`` and as ``a.b.c``, which may be a module."""
    yield from imported_by(path)
    for node in import_nodes(path):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def imports() -> dict[str, set[str]]:
    """Find which modules each module imports; of a package and a module in it, the module."""
    found = {}
    for name, path in modules().items():
        ours = {other for other in names_imported_by(path) if other in modules()} - {name}
        found[name] = {other for other in ours if not any(each.startswith(f"{other}.") for each in ours)}
    return found


@cache
def rooms(package: str) -> dict[str, set[str]]:
    """Find which modules and folders directly in a package import which others of them."""
    found: dict[str, set[str]] = {}
    for name, others in imports().items():
        if name.startswith(f"{package}."):
            mine = name.removeprefix(f"{package}.").split(".")[0]
            ours = [each.removeprefix(f"{package}.") for each in others if each.startswith(f"{package}.")]
            found.setdefault(mine, set()).update({each.split(".")[0] for each in ours} - {mine})
    return found


def test_no_module_imports_relatively() -> None:
    nodes = {name: import_nodes(path) for name, path in modules().items()}
    assert [name for name, found in nodes.items() if any(getattr(node, "level", 0) for node in found)] == []


def packages() -> list[str]:
    return sorted({name.rpartition(".")[0] for name in modules() if "." in name})


def test_there_are_modules_to_check() -> None:
    assert len(modules()) > 50
    assert len(packages()) > 50


def test_nothing_but_flotilla_is_imported_of_ours() -> None:
    tests = [path for top in ("tests", "benchmarks", "examples") for path in (ROOT / top).rglob("*.py")]
    others = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in [*modules().values(), *tests]
        for name in imported_by(path)
        if name.split(".")[0] in {"services", "shared"}
    }

    assert others == set()


def test_imports_run_downwards_only() -> None:
    def is_allowed(mine: list[str], other: list[str]) -> bool:
        if other[0] in {"tests", "benchmarks", "examples"}:
            return False
        if other[0] != "flotilla" or other == ["flotilla"]:
            return True
        if other[1:2] == ["shared"]:
            return True
        if mine[1:2] == ["shared"]:
            return False
        return mine[1:2] != ["services"] or other[:3] == mine[:3]

    upwards = {
        (mine, other)
        for mine, path in modules().items()
        for other in imported_by(path)
        if not is_allowed(mine.split("."), other.split("."))
    }
    assert upwards == set()


@pytest.mark.parametrize("package", packages())
def test_what_is_in_a_package_imports_in_one_direction(package: str) -> None:
    """No two folders import each other, and no folder imports a module of its parent that imports the folder."""
    list(TopologicalSorter(rooms(package)).static_order())


def test_modules_import_each_other_in_one_direction() -> None:
    list(TopologicalSorter(imports()).static_order())


def test_shared_has_only_errors_and_the_clock_at_its_top() -> None:
    assert {path.name for path in (ROOT / "shared").glob("*.py")} == {"__init__.py", "clock.py", "errors.py"}


def test_torch_is_imported_only_where_weights_are_computed() -> None:
    found = set()
    for path in modules().values():
        relative = path.relative_to(ROOT).as_posix()
        # transformers' tokenizers and image processors need no torch.
        is_without = relative in {"shared/models/prompts.py", "shared/vision/processor.py"}
        barred = TORCH - {"transformers"} if is_without else TORCH
        if not relative.startswith(MAY_IMPORT_TORCH):
            found |= {(relative, name) for name in imported_by(path) if name.split(".")[0] in barred}

    assert found == set()


def test_algorithms_import_nothing_of_ours_but_types_and_pure_statistics() -> None:
    algorithms = sorted((ROOT / "services/trainer/algorithms").rglob("*.py"))
    ours = {(path.name, name) for path in algorithms for name in imported_by(path) if name.startswith("flotilla")}
    allowed = ("flotilla.services.trainer.algorithms", "flotilla.shared.config", "flotilla.shared.statistics")

    assert algorithms
    assert {each for each in ours if not each[1].startswith(allowed)} == set()


WITH_TORCH = {"torch", "transformers", "safetensors"}
SMALL = {
    **dict.fromkeys(("services.gateway", "services.reward", "services.sandbox", "cli"), WITH_TORCH),
    # In the interpreter of somebody else's package.
    "agents": WITH_TORCH | {"psutil", "redis", "numpy", "fastapi", "sqlalchemy"},
}


@pytest.mark.parametrize(("package", "refused"), SMALL.items())
def test_small_images_and_agents_do_without_what_is_large_or_not_theirs(package: str, refused: set[str]) -> None:
    script = (
        "import importlib, sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {refused!r}:\n"
        "            raise ImportError(name + ' was imported')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        f"importlib.import_module('flotilla.{package}.__main__')\n"
    )

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)

    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_known_here(service: str) -> None:
    assert (ROOT / "services" / service / "__main__.py").is_file()


def test_an_engine_is_known_only_by_what_runs_around_it() -> None:
    """Decoders know no engine, the embedded engine no process, and who receives weights none of the three."""
    engines = "flotilla.services.rollout.engines"
    found = rooms(engines)
    assert not {"embedded", "process"} & found["decoders"]
    assert "process" not in found["embedded"]
    receiving = [others for name, others in imports().items() if name.startswith("flotilla.services.rollout.weights.")]
    used = {other.split(".")[4] for others in receiving for other in others if other.startswith(f"{engines}.")}
    assert used == {"base"}


def test_the_trainers_supervisor_needs_no_torch() -> None:
    assert not rooms("flotilla.services.trainer")["supervisor"] - {"wire"}
    for path in (ROOT / "services/trainer/supervisor").rglob("*.py"):
        assert not TORCH & {name.split(".")[0] for name in imported_by(path)}


GATEWAY_ORDER = (
    "digest",
    "settings",
    "signals",
    "store",
    "page",
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
    "retention",
    "membership",
    "checks",
    "episodes",
    "scheduler",
    "runtime",
    "tinker",
    "state",
    "prometheus",
    "routes",
    "body_limits",
    "middleware",
    "description",
    "app",
    "standby",
    "recorded",
    "__main__",
)
"""The gateway's rooms, each above all that it may import."""


def test_the_gateways_rooms_import_only_those_below_them() -> None:
    found = rooms("flotilla.services.gateway")

    assert found.keys() == set(GATEWAY_ORDER), "a new room has its place in the order"
    place = {room: number for number, room in enumerate(GATEWAY_ORDER)}
    upwards = {(room, other) for room, others in found.items() for other in others if place[other] > place[room]}
    assert upwards == set()
