"""verl's tools: its file of classes, read and made into tools of ours; a class of the user's is played by a file."""

import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from flotilla.importers.composition import Beside
from flotilla.importers.hydra import read_yaml
from flotilla.importers.parameter import Parameter, Verdict, translated
from flotilla.importers.source import Given, Source
from flotilla.importers.values import count, flag, integer, number, text
from flotilla.importers.verl import tool_classes
from flotilla.importers.verl.carried import carried
from flotilla.importers.verl.data import SINGLE
from flotilla.importers.verl.rules import lengths

Fields = dict[str, Any]

MULTI: Final = "actor_rollout_ref.rollout.multi_turn"
PATH, TOOLS = f"{MULTI}.tool_config_path", f"{MULTI}.tool_config"
MAX_ABOVE: Final = 8
MOST_TURNS: Final = 64
"""Where verl bounds an episode by its tokens alone."""
CELL_SECONDS: Final = 30.0
SANDBOXES: Final = ("SandboxFusionTool", "CustomSandboxFusionTool")
GSM8K: Final = '''"""verl's Gsm8kTool: says whether an answer is that of the row. Written by `flotilla import verl`."""

import json
import re

NUMBER = re.compile(r"-?[0-9][0-9.,]*")


def call_{name}(answer: str = "", *, row: dict) -> str:
    answer = answer if answer.startswith("#### ") else "#### " + answer
    numbers = [found.replace(",", "").rstrip(".") for found in NUMBER.findall(answer)]
    reward = 1.0 if numbers and numbers[-1] == str(truth_of(row)).replace(",", "") else 0.0
    return f"Current parsed {{answer=}} {{reward=}}"


def truth_of(row: dict) -> object:
    column = row.get("reward_model")
    try:
        column = json.loads(column) if isinstance(column, str) else column
    except ValueError:
        column = None
    return column["ground_truth"] if isinstance(column, dict) and "ground_truth" in column else row["label"]


call_{name}.schema = json.loads({schema!r})
'''
SEARCH: Final = '''"""verl's SearchTool: asks a service for passages. Written by `flotilla import verl`."""

import json
import time
import urllib.error
import urllib.request

URL = {url!r}
PASSAGES = {passages}
SECONDS = {seconds}
TRIES = 10


def call_{name}(query_list: object = None) -> str:
    if not query_list or not isinstance(query_list, list):
        return _said("Error: 'query_list' is missing, empty, or not a list in parameters.")
    found = _asked({{"queries": query_list, "topk": PASSAGES, "return_scores": True}}).get("result") or []
    return _said("\\n---\\n".join(map(_listed, found)) if found else "No search results found.")


def _said(text: str) -> str:
    return json.dumps({{"result": text}}, ensure_ascii=False)


def _asked(body: dict) -> dict:
    """Post it; a service that is away is asked again, and then is an error of the episode."""
    headers = {{"Content-Type": "application/json", "Accept": "application/json"}}
    for number in range(1, TRIES + 1):
        request = urllib.request.Request(URL, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code not in (500, 502, 503, 504) or number == TRIES:
                raise ConnectionError(f"{{URL}} answers {{error.code}}") from error
        except OSError as error:
            if number == TRIES:
                raise ConnectionError(f"{{URL}} cannot be asked: {{error}}") from error
        time.sleep(number)


def _listed(passages: list) -> str:
    made = ""
    for number, passage in enumerate(passages, 1):
        title, _, text = passage["document"]["contents"].partition("\\n")
        made += f"Doc {{number}} (Title: {{title}})\\n{{text}}\\n\\n"
    return made.strip()


call_{name}.schema = json.loads({schema!r})
'''
SCHEMA = {"type": "function", "function": {"name": "check", "parameters": {"type": "object", "properties": {}}}}
WITH_TOOLS = {f"{TOOLS}.check": {"class_name": "verl.tools.gsm8k_tool.Gsm8kTool", "tool_schema": SCHEMA}}
ENABLED = {**WITH_TOOLS, f"{MULTI}.enable": True}

ROWS: tuple[Parameter, ...] = (
    Parameter(name=PATH, verdict=Verdict.TRANSLATED, is_tree=True, targets=("rollout.episodes",),
              reason="the file is read; each of its tools has an entry of its own"),
    Parameter(name=TOOLS, verdict=Verdict.TRANSLATED, is_tree=True, targets=("rollout.episodes",),
              reason="a tool of ours that does the same"),
    translated(f"{MULTI}.enable", "rollout.episodes", flag, "turns with the tools of the file", example=True,
               default=False, context=WITH_TOOLS),
    translated(f"{MULTI}.max_assistant_turns", "rollout.episodes.max_turns", integer,
               f"most answers of an episode; where nothing is said, {MOST_TURNS}, and its tokens bound it", example=3,
               default=None, context=ENABLED, aliases=(f"{MULTI}.max_turns",)),
    translated(f"{MULTI}.max_user_turns", "rollout.episodes.max_turns", integer,
               "turns of tools: one less than answers", example=3, default=None, context=ENABLED),
    translated(f"{MULTI}.max_parallel_calls", "rollout.episodes.max_parallel_calls", count, "calls of one answer",
               example=4, default=1, context=ENABLED),
    translated(f"{MULTI}.max_tool_response_length", "rollout.episodes.max_result_characters", count,
               "characters of a result", example=512, default=256, context=ENABLED),
    translated(f"{MULTI}.format", "rollout.episodes.format", text, "hermes; others are refused", example="qwen",
               default="hermes", context=ENABLED),
)  # fmt: skip


def with_tools(given: Sequence[Given], beside: Beside) -> list[Given]:
    """Add what the file of tools holds to the parameters that name it; one that is not found is refused."""
    made: list[Given] = []
    for each in given:
        if each.spelling != PATH or not isinstance(each.value, str) or each.refusal is not None:
            made.append(each)
            continue
        lying = (found for place in _places(each.value) if (found := beside(place)) is not None)
        content = next(lying, None) or carried(each.value)
        if content is None:
            why = (
                "the file is not found beside the launch file or above it, and without it an import makes single "
                "turns: give --config-dir DIR, the folder that it lies in, or --set 'rollout.episodes={kind: tools, "
                "tools: [...]}' with functions, URLs or MCP servers"
            )
            made.append(replace(each, refusal=why))
            continue
        made.append(each)
        made += _tools(content, each)
    return made


def _places(path: str) -> Iterator[str]:
    yield path
    if not path.startswith(("/", "~")):
        for number in range(1, MAX_ABOVE):
            yield posixpath.normpath(posixpath.join("../" * number, path))
    yield posixpath.basename(path)


def _tools(content: str, path: Given) -> Iterator[Given]:
    tools = read_yaml(content, source=str(path.value)).get("tools")
    for position, tool in enumerate(tools if isinstance(tools, list) else ()):
        name = _name(tool) if isinstance(tool, Mapping) else None
        yield Given(tool, f"{TOOLS}.{name or position}", path.where)


def _name(tool: Mapping[str, Any]) -> str | None:
    schema = tool.get("tool_schema")
    function = schema.get("function") if isinstance(schema, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) and tool_classes.NAME.fullmatch(name) else None


def episodes(source: Source) -> Fields:
    """Make turns with tools, where verl has them."""
    written = source.trees.get(TOOLS, {})
    if not source.value(f"{MULTI}.enable"):
        _refuse_turns(source)
        return {}
    made = [tool for spelling, value in written.items() if (tool := _tool(source, spelling, value)) is not None]
    if not made:
        source.refuse(
            f"{MULTI}.enable",
            "there are no tools that are known, and without them an import makes single turns: leave it out, or give "
            "--set 'rollout.episodes={kind: tools, tools: [...]}' with functions, URLs or MCP servers",
        )
        _refuse_turns(source)
        return {}
    answers, results = (source.value(f"{MULTI}.max_{who}_turns") for who in ("assistant", "user"))
    limits = [each for each in (answers, None if results is None else results + 1) if each is not None]
    parallel = source.value(f"{MULTI}.max_parallel_calls") or 1
    form = source.choose(f"{MULTI}.format", {"hermes": "hermes", "qwen": "qwen", "None": "hermes"})
    slowest = max(float(tool.get("run_seconds", 0.0)) for tool in made) * parallel
    section: Fields = {
        "kind": "tools",
        "format": form or "hermes",
        "tools": made,
        "max_turns": max(min(limits), 1) if limits else MOST_TURNS,
        "max_parallel_calls": parallel,
        "max_result_characters": max(source.value(f"{MULTI}.max_tool_response_length") or 256, 100),
    }
    section |= {"step_seconds": slowest} if slowest > 60.0 else {}
    return {"rollout.episodes": section | _together(source)}


def _together(source: Source) -> Fields:
    """Make the bound of answers and results together, where the engine's context does not reach it anyway."""
    found = lengths(source)
    most = int(found["rollout.sampling.max_new_tokens"])
    return {"max_response_tokens": most} if most < found["rollout.engine.context_tokens"] else {}


def _refuse_turns(source: Source) -> None:
    """Refuse what bounds turns where there are none: rows may name another agent loop, which reads it all the same."""
    for row in ROWS:
        is_given = not row.is_tree and row.name != f"{MULTI}.enable" and row.name in source.given
        if is_given and source.value(row.name) not in {None, row.default}:
            source.refuse(row.name, SINGLE)


def _tool(source: Source, spelling: str, tool: Any) -> Fields | None:
    described = tool if isinstance(tool, Mapping) else {}
    name, kind = _name(described), str(described.get("class_name", "")).rpartition(".")[2]
    config = {} if described.get("config") is None else described["config"]
    schema = {} if described.get("tool_schema") is None else described["tool_schema"]
    problem = tool_classes.why_no_json(config, "config") or tool_classes.why_no_json(schema, "tool_schema")
    if problem is not None:
        source.refuse_written(spelling, f"{problem}: give one of texts, finite numbers, lists and mappings")
        return None
    if kind in SANDBOXES:
        seconds = (
            number(f"{spelling}.config.default_timeout", config.get("default_timeout") or CELL_SECONDS) or CELL_SECONDS
        )
        function = schema.get("function")
        description = function.get("description") if isinstance(function, Mapping) else None
        made: Fields = {"kind": "code_interpreter", "name": name or "code_interpreter", "run_seconds": float(seconds)}
        return made | ({"description": description} if description else {})
    if kind == "Gsm8kTool" and name is not None:
        return _written(source, name, GSM8K.format(name=name, schema=json.dumps(schema)))
    if kind == "SearchTool" and name is not None:
        return _search(source, spelling, name, config, schema)
    return _of_class(source, spelling, name, described)


def _written(source: Source, name: str, text: str) -> Fields:
    """Put a file beside the spec, and make the tool that is its function."""
    place = tool_classes.place_of(name)
    source.files[place.partition(":")[0]] = text
    return {"kind": "python", "path": place}


def _of_class(source: Source, spelling: str, name: str | None, described: Mapping[str, Any]) -> Fields | None:
    """Make a file that plays a class; nothing where it cannot be played."""
    path, schema = str(described.get("class_name", "")), described.get("tool_schema")
    problem = tool_classes.why_not(path, schema, name)
    if problem is not None or name is None or not isinstance(schema, Mapping):
        source.refuse_written(
            spelling, f"{problem}; or a function, a URL or an MCP server with --set 'rollout.episodes.tools=[...]'"
        )
        return None
    made = _written(source, name, tool_classes.written(path, name, described.get("config") or {}, schema))
    source.note(
        f"{path} is imported by {made['path'].partition(':')[0]} where rollouts run: put its module, or the package "
        "that it is in, beside the spec, or install it there"
    )
    return made


def _search(
    source: Source, spelling: str, name: str, config: Mapping[str, Any], schema: Mapping[str, Any]
) -> Fields | None:
    url = config.get("retrieval_service_url")
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        source.refuse_written(spelling, "config.retrieval_service_url is the address of a service: give one")
        return None
    text = SEARCH.format(
        name=name,
        schema=json.dumps(schema),
        url=url,
        passages=integer(spelling, config.get("topk", 3)),
        seconds=float(number(spelling, config.get("timeout", 30)) or 30),
    )
    return _written(source, name, text)
