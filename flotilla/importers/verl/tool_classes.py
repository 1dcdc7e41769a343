"""A tool class of the user's, by verl's protocol: a file beside the spec that makes it a Flotilla function."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

CLASS: Final = re.compile(r"(?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*")
NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
"""Of a tool that a file is written for: the file and its function are named after it."""
FILE: Final = re.compile(rf"flotilla_({NAME.pattern})_tool\.py")
OF_ITS_ROWS: Final = ("ImageZoomInTool",)
"""Classes of verl's that it gives the images of the row."""
TEXT: Final = '''"""Plays a tool class by verl's protocol. Written by `flotilla import verl`.

{module} is imported where rollouts run: it lies beside this file, or is installed there. What tools import of verl
has stand-ins here, for where verl is not installed. For each call the class is asked to create, execute and release;
rewards that it gives are left aside.
"""

import importlib
import importlib.util
import io
import json
import sys
import types
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

CONFIG = json.loads({config!r})
SCHEMA = json.loads({schema!r})


class Schema(BaseModel):
    model_config = ConfigDict(extra="allow")


class OpenAIFunctionSchema(Schema):
    name: str
    description: str = ""
    parameters: dict[str, Any] = {{}}
    strict: bool = False


class OpenAIFunctionToolSchema(Schema):
    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(Schema):
    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class BaseTool:
    def __init__(self, config, tool_schema):
        self.config, self.tool_schema = config, tool_schema
        self.name = tool_schema.function.name

    def get_openai_tool_schema(self):
        return self.tool_schema

    async def create(self, instance_id=None, **kwargs):
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="Updated the tool state."), 0.0, {{}}

    async def calc_reward(self, instance_id, **kwargs):
        return 0.0

    async def release(self, instance_id, **kwargs):
        return None


def _stand_in():
    if "verl" in sys.modules or importlib.util.find_spec("verl") is not None:
        return
    schemas = {{each.__name__: each for each in (OpenAIFunctionSchema, OpenAIFunctionToolSchema, ToolResponse)}}
    held = {{
        "verl": {{}}, "verl.tools": {{}}, "verl.utils": {{}},
        "verl.tools.schemas": schemas,
        "verl.tools.base_tool": {{**schemas, "BaseTool": BaseTool}},
        "verl.utils.rollout_trace": {{"rollout_trace_op": lambda function: function}},
    }}
    for name, values in held.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(values)
        sys.modules[name] = module
        above, _, last = name.rpartition(".")
        if above:
            setattr(sys.modules[above], last, module)


def _made():
    _stand_in()
    kind = getattr(importlib.import_module("{module}"), "{kind}")
    schemas = importlib.import_module("verl.tools.schemas")
    return kind(config=CONFIG, tool_schema=schemas.OpenAIFunctionToolSchema.model_validate(SCHEMA))


TOOL = _made()


async def call_{name}(*, row, **arguments):
    instance = None
    try:
        instance, _ = await TOOL.create(create_kwargs=_given(row).get("create_kwargs") or {{}})
        found, *_ = await TOOL.execute(instance, arguments)
    except Exception as error:
        return f"Error when executing tool: {{error}}"
    finally:
        if instance is not None:
            await TOOL.release(instance)
    if getattr(found, "video", None):
        raise ConnectionError("the tool's result is a video, and results are text and images here")
    text = found if isinstance(found, str) else found.text or ""
    images = [{{"type": "image", "image": _encoded(each)}} for each in getattr(found, "image", None) or ()]
    return [{{"type": "text", "text": text}}, *images] if images else text


def _encoded(image):
    """Return an encoded image, or its data: URI, as it is, and one of Pillow's as a PNG."""
    if isinstance(image, (bytes, str)):
        return image
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _given(row):
    """Return what the row says to this tool."""
    extra = _plain(row.get("extra_info"))
    return _plain(_plain(extra.get("tools_kwargs")).get("{name}"))


def _plain(value):
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {{}}
    return value if isinstance(value, dict) else {{}}


call_{name}.schema = SCHEMA
'''


def place_of(name: str) -> str:
    """Name the file and the function in it that are a tool, as ``kind: python`` has it.

    Neither is the tool's name itself: a module of the user's may be called ``NAME_tool``, and a tool ``class``.
    """
    return f"flotilla_{name}_tool.py:call_{name}"


def name_in(file: str) -> str | None:
    """Return the name of the tool that a file was written for; None of another file."""
    found = FILE.fullmatch(file)
    return found and found[1]


def why_no_json(value: object, what: str) -> str | None:
    """Return why something of a launch file cannot be written into a file of Python; None where it can."""
    if not isinstance(value, Mapping):
        return f"{what} is no mapping"
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return f"{what} is no JSON: {error}"
    return None


def needed_by(text: str) -> str | None:
    """Return the module that a file imports which was written here; None where it is none of these."""
    found = re.search(r'kind = getattr\(importlib\.import_module\("([\w.]+)"\)', text)
    return found and found[1]


def why_not(path: str, schema: object, name: str | None) -> str | None:
    """Return why a class cannot be played; None where it can."""
    kind = path.rpartition(".")[2]
    if not CLASS.fullmatch(path):
        return f"{path or 'what is no class'} is no class in a module, as package.module.Class"
    if name is not None and path.partition(".")[0] == f"flotilla_{name}_tool":
        return f"{path} is in a module of the name of the file that is written: give it another name"
    if kind in OF_ITS_ROWS:
        return f"{kind} is given the images of the row, and tools are given its other columns here"
    if name is None or not isinstance(schema, Mapping):
        return (
            f"{kind} has no tool_schema with a function's name here, of letters, digits and _, 64 at most, and the "
            "policy is shown nothing else: give it"
        )
    return None


def written(path: str, name: str, config: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Write the file.

    Args:
        path: of the class, dotted.
        name: of the tool.
        config: that the class is made with; both this and the schema are JSON, see ``why_no_json``.
        schema: that the policy is shown.
    """
    module, _, kind = path.rpartition(".")
    return TEXT.format(module=module, kind=kind, name=name, config=json.dumps(config), schema=json.dumps(schema))
