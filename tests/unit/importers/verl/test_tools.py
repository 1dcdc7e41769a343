"""verl's file of tools: known classes become tools of ours, others are refused by name."""

import datetime
import importlib.util
import json
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla.importers.build import Imported, build
from flotilla.importers.parameter import Verdict
from flotilla.importers.systems import SYSTEMS, read
from flotilla.importers.verl.tools import ENABLED
from flotilla.services.rollout.custom.process import CustomProcess
from flotilla.services.rollout.episodes.observations import message_of
from flotilla.shared.config.sections.episodes import ToolEpisodesConfig
from flotilla.shared.vision.files import size_of
from tests.unit.importers.sources import BASES, import_flat, nested

MULTI = "actor_rollout_ref.rollout.multi_turn"


def tool(kind: str, name: str, **config: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"answer": {"type": "string"}}}
    function = {"name": name, "description": f"{name} it.", "parameters": parameters}
    return {"class_name": f"verl.tools.x.{kind}", "config": config, "tool_schema": {"function": function}}


def imported(*tools: dict[str, Any], at: str = "conf/tools.yaml", **multi: Any) -> Imported:
    values = {**BASES["verl"], f"{MULTI}.tool_config_path": "conf/tools.yaml", f"{MULTI}.enable": True}
    values |= {f"{MULTI}.{name}": value for name, value in multi.items()}
    files = {at: yaml.safe_dump({"tools": list(tools)})}
    given = read("verl", yaml.safe_dump(nested(values)), (), {}, source="launch.yaml", beside=files.get)
    return build(SYSTEMS["verl"], given, rows=100_000)


def test_known_classes_become_tools_of_ours(tmp_path: Path) -> None:
    found = imported(
        tool("Gsm8kTool", "check"), tool("CustomSandboxFusionTool", "python", default_timeout=20),
        max_user_turns=4, max_assistant_turns=9, max_parallel_calls=2, max_tool_response_length=512,
    )  # fmt: skip

    assert found.may_run(), found.report.render()
    assert found.spec is not None and found.spec.runs_code
    episodes = found.spec.rollout.episodes
    assert isinstance(episodes, ToolEpisodesConfig)
    function, interpreter = episodes.tools
    assert (function.kind, interpreter.kind) == ("python", "code_interpreter")
    assert interpreter.model_dump()["name"] == "python" and interpreter.model_dump()["run_seconds"] == 20.0
    assert (episodes.max_turns, episodes.max_parallel_calls, episodes.max_result_characters) == (5, 2, 512)
    entries = {entry.name: entry.verdict for entry in found.report.entries}
    assert entries[f"{MULTI}.tool_config.check"] is Verdict.TRANSLATED
    path = tmp_path / "flotilla_check_tool.py"
    path.write_text(found.files["flotilla_check_tool.py"])
    made = importlib.util.spec_from_file_location("check_tool", path)
    assert made is not None and made.loader is not None
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    row = {"label": None, "reward_model": {"ground_truth": "1,234"}}
    assert module.call_check("so 1234.", row=row) == "Current parsed answer='#### so 1234.' reward=1.0"
    assert module.call_check("5", row={"label": "6"}).endswith("reward=0.0")
    assert module.call_check.schema["function"]["name"] == "check"


@pytest.mark.parametrize("at", ["conf/tools.yaml", "../../conf/tools.yaml", "tools.yaml"])
def test_the_file_is_found_beside_above_or_in_the_folder_that_is_given(at: str) -> None:
    assert imported(tool("Gsm8kTool", "check"), at=at).may_run()


def test_a_file_that_is_missing_is_refused() -> None:
    found = imported(at="elsewhere.yaml")

    refused = {entry.name: entry.detail for entry in found.report.refused}
    assert "--config-dir" in refused[f"{MULTI}.tool_config_path"]
    assert not found.may_run()


def test_a_class_that_cannot_be_played_is_refused_by_name_and_the_others_are_kept() -> None:
    found = imported(tool("Gsm8kTool", "check"), tool("ImageZoomInTool", "zoom"))

    refused = {entry.name: entry.detail for entry in found.report.refused}
    assert list(refused) == [f"{MULTI}.tool_config.zoom"]
    assert "ImageZoomInTool is given the images of the row" in refused[f"{MULTI}.tool_config.zoom"]
    assert found.spec is not None and isinstance(found.spec.rollout.episodes, ToolEpisodesConfig)
    assert len(found.spec.rollout.episodes.tools) == 1


def of_script(*words: str, module: str = "verl.trainer.main_ppo") -> Imported:
    line = " ".join(f"{name}={value}" for name, value in BASES["verl"].items())
    given = read("verl", f"python3 -m {module} {' '.join(words)} {line}\n", (), {}, source="run.sh")
    return build(SYSTEMS["verl"], given, rows=100_000)


def test_verls_own_files_need_not_lie_beside_the_script() -> None:
    folder = "/src/examples/sglang_multiturn/config"
    words = (f"--config-path={folder}", "--config-name=search_multiturn_grpo")

    found = of_script(*words, f"{MULTI}.tool_config_path={folder}/tool_config/search_tool_config.yaml")

    assert found.may_run(), found.report.render()
    assert found.spec is not None and isinstance(found.spec.rollout.episodes, ToolEpisodesConfig)
    assert (found.spec.rollout.episodes.max_turns, found.spec.rollout.episodes.format) == (2, "qwen")
    assert found.spec.data.shuffle is False
    assert "http://127.0.0.1:8000/retrieve" in found.files["flotilla_search_tool.py"]


def test_a_users_file_of_that_name_wins_over_verls_own() -> None:
    found = imported(tool("Gsm8kTool", "check"), at="recipe/retool/sandbox_fusion_tool_config.yaml")
    assert f"{MULTI}.tool_config_path" in {entry.name for entry in found.report.refused}
    path = "recipe/retool/sandbox_fusion_tool_config.yaml"
    files = {path: yaml.safe_dump({"tools": [tool("Gsm8kTool", "check")]})}
    values = {**BASES["verl"], f"{MULTI}.tool_config_path": path, f"{MULTI}.enable": True}

    given = read("verl", yaml.safe_dump(nested(values)), (), {}, source="launch.yaml", beside=files.get)

    assert "flotilla_check_tool.py" in build(SYSTEMS["verl"], given, rows=100_000).files


@pytest.mark.parametrize("module", ["recipe.transfer_queue.main_ppo", "examples.split_placement.main_ppo_split"])
def test_programs_that_only_place_or_move_otherwise_are_the_synchronous_trainer(module: str) -> None:
    assert of_script(module=module).document == of_script().document


def test_the_search_tool_asks_the_service_as_verls_does(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    class Passages(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            passage = {"document": {"contents": "Lakes\nSome are frozen."}, "score": 0.5}
            body = json.dumps({"result": [[passage, passage], [passage]]}).encode()
            self.send_response(503 if len(asked) == 1 else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Passages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/retrieve"
        module = loaded(
            tmp_path, imported(tool("SearchTool", "search", retrieval_service_url=url)), "flotilla_search_tool.py"
        )
        module.time = types.SimpleNamespace(sleep=lambda seconds: None)
        said = json.loads(module.call_search(["where", "what"]))
        server.shutdown()

    assert asked[-1] == {"queries": ["where", "what"], "topk": 3, "return_scores": True} and len(asked) == 2
    lake = "Doc 1 (Title: Lakes)\nSome are frozen."
    assert said == {"result": f"{lake}\n\nDoc 2{lake[5:]}\n---\n{lake}"}
    assert "is missing" in module.call_search("where")


def loaded(folder: Path, found: Imported, name: str) -> Any:
    path = folder / name
    path.write_text(found.files[name])
    made = importlib.util.spec_from_file_location(path.stem, path)
    assert made is not None and made.loader is not None
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


def test_answers_and_results_are_bounded_together_as_verl_bounds_them() -> None:
    lengths = {"data.max_prompt_length": 100, "data.max_response_length": 300}

    made = import_flat("verl", {**BASES["verl"], **ENABLED, **lengths})

    assert made.document["rollout"]["episodes"]["max_response_tokens"] == 300
    assert made.document["rollout"]["engine"]["context_tokens"] == 400


CALCULATOR = """
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class Calculator(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.held = {}

    async def create(self, instance_id=None, **kwargs):
        name = str(uuid4())
        self.held[name] = kwargs["create_kwargs"].get("start", 0)
        return name, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        total = self.held[instance_id] + int(parameters["answer"]) * self.config["factor"]
        return ToolResponse(text=f"{self.name}: {total}, held {len(self.held)}"), 0.5, {}

    async def release(self, instance_id, **kwargs):
        del self.held[instance_id]
"""


async def test_a_users_class_is_played_in_the_process_of_tools(tmp_path: Path) -> None:
    given = {**tool("Calculator", "sum_up", factor=10), "class_name": "tools_of_mine.calculator.Calculator"}
    found = imported(given)
    assert found.may_run(), found.report.render()
    assert found.spec is not None and isinstance(found.spec.rollout.episodes, ToolEpisodesConfig)
    assert "beside the spec" in found.report.render()
    (tmp_path / "tools_of_mine").mkdir()
    (tmp_path / "tools_of_mine" / "calculator.py").write_text(CALCULATOR)
    (tmp_path / "flotilla_sum_up_tool.py").write_text(found.files["flotilla_sum_up_tool.py"])
    (section,) = found.spec.rollout.episodes.tools
    process = CustomProcess(tools=[f"{tmp_path}/{section.model_dump()['path']}"])
    row = {"extra_info": {"tools_kwargs": {"sum_up": {"create_kwargs": {"start": 5}}}}}
    try:
        (schema,) = await process.start()
        said = [await process.ask("call", 0, [{"answer": answer}, row]) for answer in ("1", "2", "three")]
        bare = await process.ask("call", 0, [{"answer": "4"}, {"extra_info": "no JSON"}])
    finally:
        await process.aclose()

    assert schema == given["tool_schema"]
    assert said[:2] == ["sum_up: 15, held 1", "sum_up: 25, held 1"]
    assert said[2].startswith("Error when executing tool: invalid literal")
    assert bare == "sum_up: 40, held 1"


PLAIN = """
from verl.tools.base_tool import BaseTool, ToolResponse


class Plain(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=f"{self.name} {self.config} {parameters}"), 0.0, {}
"""
CAMERA = """
from PIL import Image
from verl.tools.base_tool import BaseTool, ToolResponse


class Camera(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="seen", image=[Image.new("RGB", (16, 8), (220, 30, 30))]), 0.0, {}
"""
OWN_NAMES = ["json", "TOOL", "_plain", "isinstance", "class", "None", "sys", "BaseTool", "calc", "NUMBER", "str"]


async def played(folder: Path, found: Imported, label: str) -> tuple[Any, str]:
    """Load the one tool as a rollout does, and call it; gives the schema and the answer."""
    assert found.may_run(), found.report.render()
    assert found.spec is not None and isinstance(found.spec.rollout.episodes, ToolEpisodesConfig)
    (section,) = found.spec.rollout.episodes.tools
    for name, text in found.files.items():
        (folder / name).write_text(text)
    process = CustomProcess(tools=[f"{folder}/{section.model_dump()['path']}"])
    try:
        (schema,) = await process.start()
        return schema, await process.ask("call", 0, [{"answer": "7"}, {"label": label}])
    finally:
        await process.aclose()


@pytest.mark.parametrize("name", OWN_NAMES)
async def test_a_tool_may_have_the_name_of_anything_in_the_file_that_plays_it(tmp_path: Path, name: str) -> None:
    given = {**tool("Plain", name, few=[1.5, "{x}"], none=None, on=True), "class_name": f"{name}_tool.Plain"}
    (tmp_path / f"{name}_tool.py").write_text(PLAIN)

    schema, said = await played(tmp_path, imported(given), "7")

    assert schema == given["tool_schema"]
    assert said == f"{name} {given['config']} {{'answer': '7'}}"


@pytest.mark.parametrize("name", ["json", "class", "truth_of"])
async def test_a_known_tool_may_have_such_a_name_too(tmp_path: Path, name: str) -> None:
    given = tool("Gsm8kTool", name)

    schema, said = await played(tmp_path, imported(given), "7")

    assert (schema, said) == (given["tool_schema"], "Current parsed answer='#### 7' reward=1.0")


@pytest.mark.parametrize("kind", ["mine.Plain", "verl.tools.x.SandboxFusionTool", "verl.tools.x.SearchTool"])
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("foo", "config is no mapping"),
        ([1], "config is no mapping"),
        (5, "config is no mapping"),
        ({"a": float("nan")}, "config is no JSON"),
        ({"a": datetime.date(2026, 1, 1)}, "config is no JSON"),
    ],
)
def test_a_configuration_that_cannot_be_written_down_is_refused_in_words(kind: str, config: Any, words: str) -> None:
    given = {**tool("Plain", "calc"), "class_name": kind, "config": config}

    found = imported(given)

    assert words in {entry.name: entry.detail for entry in found.report.refused}[f"{MULTI}.tool_config.calc"]


def test_a_schema_that_is_no_mapping_is_refused_in_words() -> None:
    found = imported({"class_name": "x.SandboxFusionTool", "config": {}, "tool_schema": ["x"]})

    assert "tool_schema is no mapping" in found.report.render()


def test_a_class_in_a_module_of_the_written_files_name_is_refused() -> None:
    found = imported({**tool("Plain", "calc"), "class_name": "flotilla_calc_tool.Plain"})

    assert "give it another name" in found.report.render()


async def test_a_class_that_answers_with_images_shows_them(tmp_path: Path) -> None:
    (tmp_path / "lens_tool.py").write_text(CAMERA)

    _, said = await played(tmp_path, imported({**tool("Camera", "lens"), "class_name": "lens_tool.Camera"}), "7")

    message = message_of("tool", said)
    assert message.content == "seen<image>"
    assert size_of(message.images[0]) == (16, 8)
