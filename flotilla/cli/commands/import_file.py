"""``flotilla import auto | verl | openrlhf | roll | trl | coverage``: launch files. No torch, no fleet needed."""

import argparse
import json
import os
import sys
from pathlib import Path

from flotilla.cli.output import write_json
from flotilla.importers.build import Imported, build
from flotilla.importers.commented import commented
from flotilla.importers.coverage import UNACCOUNTED, counts, coverage, refused_share
from flotilla.importers.engines import named_engine
from flotilla.importers.source import Given
from flotilla.importers.systems import SCRIPTS, beside, detect, read, read_launch_text, read_openrlhf, system_of
from flotilla.shared.config.load.yaml_text import write_value
from flotilla.shared.environment.settings import ENGINE_PYTHONS
from flotilla.shared.errors import InvalidRequest

AUTO, EMBEDDED_ENGINE = "auto", "embedded"
AGENT_FILES = frozenset({"--agent_func_path", "--train.agent_func_path"})
"""Flags that name a file with an agent."""
HEADER = "# Imported from {system} by `flotilla import {system}`; relative paths start at this file's folder.\n"


async def import_file(arguments: argparse.Namespace) -> int:
    """Import one launch file: the spec to a file or standard output, the report beside it; then try it, if asked to."""
    _check_trial(arguments)
    imported = _imported(arguments)
    is_whole = imported.may_run(allow_refused=arguments.allow_refused, strict=arguments.strict)
    report = sys.stdout if arguments.output or arguments.tries else sys.stderr
    report.write(_report(imported, arguments.json))
    if not is_whole:
        sys.stderr.write(_why_not(imported, strict=arguments.strict))
        return 1
    document = HEADER.format(system=arguments.system) + _yaml(imported)
    if arguments.tries and arguments.output is None:
        return await _try(imported, Path.cwd(), arguments)
    if arguments.output is None:
        if imported.files:
            sys.stderr.write(f"flotilla: the spec needs {', '.join(imported.files)} beside it: give --output FILE\n")
            return 1
        sys.stdout.write(document)
        return 0
    output = Path(arguments.output)
    written = {output: document, **{output.parent / name: text for name, text in imported.files.items()}}
    _write(written, force=arguments.force)
    return await _try(imported, output.parent, arguments) if arguments.tries else 0


def _check_trial(arguments: argparse.Namespace) -> None:
    if arguments.keep is not None and not arguments.tries:
        raise InvalidRequest("--keep keeps the files of --try: give that, too, or leave it out")
    if arguments.tries and arguments.json:
        raise InvalidRequest("--json writes the report alone, and --try lines for people: leave one of them out")


async def _try(imported: Imported, base: Path, arguments: argparse.Namespace) -> int:
    """Run the spec scaled down; relative paths start at ``base``."""
    # Here: without --try nothing of a fleet is imported.
    from flotilla.cli.commands.trial import try_out
    from flotilla.trial_run.scaling import scale_down

    assert imported.spec is not None
    sys.stdout.flush()
    agent = _agent_file(imported, base)
    trial = scale_down(imported.spec, imported.files, base)
    keep = None if arguments.keep is None else Path(arguments.keep)
    return await try_out(imported.spec, trial, keep=keep, agent=agent, plain=not sys.stdout.isatty())


def _imported(arguments: argparse.Namespace) -> Imported:
    if arguments.system == AUTO:
        arguments.system = detect(read_launch_text(Path(arguments.file)), arguments.file)
        arguments.words = [arguments.file, *arguments.overrides]
    if arguments.system == "openrlhf":
        words = list(arguments.words)
        given = (
            _read_script(words, arguments.program)
            if words[0].endswith(SCRIPTS)
            else _read_flags(words, arguments.program)
        )
    else:
        path = Path(arguments.file)
        place = getattr(arguments, "config_dir", None)
        text = read_launch_text(path)
        around = beside(path.parent, read_launch_text, first=None if place is None else Path(place))
        given = read(
            arguments.system,
            text,
            arguments.overrides,
            os.environ,
            source=arguments.file,
            beside=around,
            program=arguments.program,
        )
    system, sets = system_of(arguments.system, given), arguments.set or ()
    if arguments.engine != AUTO:
        engine = None if arguments.engine == EMBEDDED_ENGINE else arguments.engine
        return build(system, given, rows=arguments.rows, overrides=sets, engine=engine)
    named = named_engine(system.name, given)
    if named is not None and ENGINE_PYTHONS[named] in os.environ:
        found = build(system, given, rows=arguments.rows, overrides=sets, engine=named)
        if found.spec is not None:
            return found
    return build(system, given, rows=arguments.rows, overrides=sets)


def _agent_file(imported: Imported, base: Path) -> Path | None:
    """Find the user's file with an agent; None where there is none, or it is not here."""
    names = [each.value for each in imported.report.entries if each.name in AGENT_FILES]
    return next((file for file in (base / Path(name).expanduser() for name in names) if file.is_file()), None)


def _read_script(words: list[str], program: int | None) -> list[Given]:
    text = read_launch_text(Path(words[0]))
    return read("openrlhf", text, words[1:], os.environ, source=words[0], program=program)


def _read_flags(words: list[str], program: int | None) -> list[Given]:
    if program is not None:
        raise InvalidRequest("--program chooses among what a script starts, and these are the flags of one program")
    return read_openrlhf(words)


def _report(imported: Imported, as_json: bool) -> str:
    if not as_json:
        return imported.report.render()
    found = {
        "system": imported.report.system,
        "counts": imported.report.counts(),
        "suggestion": list(imported.report.suggestion),
        "entries": [entry.as_dict() for entry in imported.report.entries],
        "problems": list(imported.report.problems),
        "files": sorted(imported.files),
    }
    return json.dumps(found, indent=1) + "\n"


def _why_not(imported: Imported, *, strict: bool) -> str:
    unsupported = len(imported.report.unsupported) if strict else 0
    refused, problems = len(imported.report.refused), len(imported.report.problems)
    parts = [f"{refused} refused (--allow-refused goes on without)"] if refused else []
    parts += [f"{unsupported} unsupported (accepted without --strict)"] if unsupported else []
    parts += [f"{problems} to settle"] if problems else []
    return f"flotilla: no spec was made: {', '.join(parts)}; see the report\n"


def _yaml(imported: Imported) -> str:
    plain = json.loads(json.dumps(imported.document))
    return commented(plain, imported.report.entries, imported.report.system, write_value)


def _write(files: dict[Path, str], *, force: bool) -> None:
    there = [str(path) for path in files if path.exists()]
    if there and not force:
        raise InvalidRequest(f"{', '.join(there)} is there already: --force replaces it")
    for path, text in files.items():
        unfinished = path.with_name(f".{path.name}.unfinished")
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise InvalidRequest(f"cannot write {path}: {error.strerror}") from None


async def show_coverage(arguments: argparse.Namespace) -> int:
    """Print what becomes of every parameter; a name that is not in the tables is a failure."""
    rows = coverage(Path(arguments.directory))
    refused, relevant = refused_share(rows)
    if arguments.json:
        found = {
            "counts": counts(rows),
            "refused": refused,
            "relevant": relevant,
            "parameters": [row.as_dict() for row in rows],
        }
        write_json(found)
    else:
        for row in rows:
            targets = f" -> {', '.join(row.targets)}" if row.targets else ""
            sys.stdout.write(f"{row.verdict:<11} {row.name}{targets}: {row.reason}\n")
        sys.stdout.write("\n")
        for file, by_verdict in counts(rows).items():
            sys.stdout.write(f"{file}: " + ", ".join(f"{number} {name}" for name, number in by_verdict.items()) + "\n")
        sys.stdout.write(
            f"refused, of distinct names without those of schedulers, Ray and Megatron: {refused} of {relevant} "
            f"({refused / max(relevant, 1):.1%})\n"
        )
    return 1 if any(row.verdict == UNACCOUNTED for row in rows) else 0
