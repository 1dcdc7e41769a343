"""Pages name files and commands that exist, link to pages and sections that exist, and leave out nothing of a list."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest

from docs.site.build import pages
from flotilla.cli.command_line import build_parser, leaves
from flotilla.cli.parsing import Parser
from tests.contract.shell_text import blocks, commands, inline, named_files

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GUIDES = [page for page in PAGES if page.name != "CHANGELOG.md"] + sorted((ROOT / "examples").glob("*/README.md"))
OURS = ("flotilla", "services", "shared", "tests", "benchmarks", "examples", "docker", "deploy", "docs")
FILE = re.compile(rf"`((?:{'|'.join(OURS)})/[\w./-]+)(?::\w+)?`")
SHORT = re.compile(r"`([\w.]+(?:/[\w.-]+)+\.(?:py|lua|md))`")
"""The end of a path, such as ``redis/hop.py``."""
LINK = re.compile(r"\]\((?!https?:)([\w./-]*)(?:#([\w-]+))?\)")


@cache
def files_there() -> list[str]:
    """List our files by their paths from the root."""
    return [path.relative_to(ROOT).as_posix() for top in OURS for path in (ROOT / top).rglob("*.*")]


@cache
def command_line() -> Parser:
    """Make the parser of all commands once: it takes longer than a page's commands do."""
    return build_parser()


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors_of(text: str) -> set[str]:
    """List the names under which a page's headings can be linked to."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = FILE.findall(page.read_text(encoding="utf-8"))

    assert [name for name in named if "prepared" not in name and not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_end_of_a_path_that_a_page_names_is_that_of_a_file(page: Path) -> None:
    named = set(SHORT.findall(page.read_text(encoding="utf-8")))

    assert {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in files_there())} == set()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = []
    for target, anchor in LINK.findall(text):
        path = page.parent / target if target else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors_of(path.read_text())):
            missing.append(f"{target}#{anchor}" if anchor else target)

    assert missing == []


class Misused(Exception):
    """A command line that its parser refuses; the text is what a user would be told."""


def misuse(words: list[str], *, may_lack: bool) -> str | None:
    """Say why the command line refuses these words; None if it does not.

    Args:
        words: after ``flotilla``.
        may_lack: arguments that are needed may be missing, as in a sentence about a command.
    """

    def fail(parser: Parser, message: str) -> NoReturn:
        raise Misused(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parser, "error", fail)
        try:
            command_line().parse_args(words)
        except Misused as error:
            return None if may_lack and "the following arguments are required" in str(error) else str(error)
        except SystemExit:
            return None
    return None


@pytest.mark.parametrize("page", GUIDES, ids=named)
def test_every_command_on_a_page_is_one_that_the_command_line_takes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    typed = [(words, False) for line in blocks(text) for words in commands(line)]
    typed += [(words, True) for line in inline(text) for words in commands(line)]

    refused = {
        " ".join(words): why
        for words, may_lack in typed
        if words[0].rpartition("/")[2] == "flotilla" and re.match("[a-z]|--", " ".join(words[1:]))
        if (why := misuse(words[1:], may_lack=may_lack))
    }

    assert refused == {}


def is_there(name: str, shown: dict[str, str]) -> bool:
    """Whether a program is one of the repository, or one that the page itself shows."""
    return (ROOT / name).exists() or name in shown


@pytest.mark.parametrize("page", GUIDES, ids=named)
def test_every_target_and_module_on_a_page_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    shown = named_files(text)
    missing = []
    for words in (words for line in [*blocks(text), *inline(text)] for words in commands(line)):
        program = words[0].rpartition("/")[2]
        if program == "make" and len(words) > 1:
            missing += [word for word in words[1:] if word.islower() and word not in targets]
        if program.startswith("python") and len(words) > 1:
            missing += [words[1]] if words[1].endswith(".py") and not is_there(words[1], shown) else []
            module = words[2] if words[1] == "-m" and len(words) > 2 else ""
            missing += [module] if module.partition(".")[0] in OURS and find_spec(module) is None else []

    assert missing == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("flotilla spec check FILE [--data] [--set KEY=VALUE]   # why", [["flotilla", "spec", "check", "1", "--data"]]),
        ("A=1 .venv/bin/flotilla ls > x; cd y && flotilla up", [[".venv/bin/flotilla", "ls"], ["x"], ["cd", "y"]]),
        ("flotilla stop ...", [["flotilla", "stop"]]),
        ("it's not a shell line", []),
    ],
)
def test_a_line_is_split_as_a_shell_does(line: str, words: list[list[str]]) -> None:
    found = list(commands(line))

    assert [each[: len(first)] for each, first in zip(found, words, strict=False)] == words


@pytest.mark.parametrize("line", ["flotilla lss", "flotilla ls --jsn", "flotilla drain", "flotilla up --port x"])
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    (words,) = commands(line)

    assert misuse(words[1:], may_lack=False)


def test_every_command_is_on_the_page_of_the_command_line() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")

    assert [command for command in leaves(command_line()) if f"flotilla {command}" not in page] == []


def text_of(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def sources(*tops: str) -> list[str]:
    return [path.read_text(encoding="utf-8") for top in tops for path in (ROOT / top).rglob("*.py")]


OF_ITS_OWN = {"FLOTILLA_PARENT_PID", "FLOTILLA_FLEET_PID"}
"""What a local fleet tells its processes, and nobody else."""


def test_every_variable_that_services_read_is_on_the_page_of_machines() -> None:
    read = {name for text in sources("services", "shared") for name in re.findall(r'"(FLOTILLA_[A-Z_]*[A-Z])"', text)}

    assert len(read) > 25
    assert [name for name in sorted(read - OF_ITS_OWN) if f"`{name}`" not in text_of("cluster.md")] == []


def types_of_events(text: str) -> set[str]:
    """Find what is stored in the event log: ``events.stage(change, experiment, TYPE, ...)``, ``append`` likewise."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    stored = [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in {"stage", "append"}
        and ast.unparse(call.func.value).endswith("events")
    ]
    values = [each.value for call in stored for each in call.args if isinstance(each, ast.Constant)]
    return {value for value in values if isinstance(value, str)}


def test_every_type_of_event_is_on_the_page_of_routes() -> None:
    stored = set().union(*map(types_of_events, sources("services/gateway")))

    assert len(stored) > 20
    assert [name for name in sorted(stored) if f"`{name}`" not in text_of("rest.md")] == []


def test_every_extra_is_on_the_page_of_installing() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    assert [name for name in extras if name != "dev" and f"`{name}`" not in text_of("install.md")] == []


def test_every_room_of_the_gateway_is_on_the_map() -> None:
    rooms = [path.parent.name for path in (ROOT / "services" / "gateway").glob("*/__init__.py")]

    assert len(rooms) > 15
    assert [name for name in rooms if f"`{name}/`" not in text_of("architecture.md")] == []


MADE = {"docs/reference/rest.md", "docs/reference/cli.md", "examples/notebook.md", "examples/sweep/sweep.md"}
"""Pages that the build writes."""


def entries(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from entries(each)


def test_every_page_has_one_place_in_the_navigation() -> None:
    settings = tomllib.loads((ROOT / "docs" / "site" / "zensical.toml").read_text(encoding="utf-8"))

    assert sorted(entries(settings["project"]["nav"])) == sorted({*map(Path.as_posix, pages(ROOT)), *MADE})


def test_every_page_of_docs_is_listed_for_coding_assistants() -> None:
    listed = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8")
    of_docs = [page.relative_to("docs").as_posix() for page in pages(ROOT) if page.parts[0] == "docs"]

    assert [page for page in of_docs if f"({page})" not in listed and not page.startswith("decisions/0")] == []
