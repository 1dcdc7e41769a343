"""Files of verl's own repository that its scripts name, as plain facts: read where none lies beside the script."""

import json
import posixpath
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

MULTI_TURN: Final = "examples/sglang_multiturn/config"


def _turns(most: int, **more: Any) -> dict[str, Any]:
    return {
        "defaults": ["ppo_trainer", "_self_"],
        "data.max_prompt_length": 1024,
        "data.max_response_length": 1024,
        "data.train_batch_size": 256,
        "data.return_raw_chat": True,
        "actor_rollout_ref.hybrid_engine": True,
        "actor_rollout_ref.rollout.name": "sglang",
        "actor_rollout_ref.rollout.multi_turn.enable": True,
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": most,
        **more,
    }


def _tool(class_name: str, function: str, description: str, argument: Mapping[str, Any], **config: Any) -> Any:
    (name,) = argument
    parameters = {"type": "object", "properties": dict(argument), "required": [name]}
    schema = {"name": function, "description": description, "parameters": parameters}
    tool = {
        "class_name": class_name,
        "config": {**config, "type": "native"},
        "tool_schema": {"type": "function", "function": schema},
    }
    return {"tools": [tool]}


def _text(description: str) -> dict[str, str]:
    return {"type": "string", "description": description}


FILES: Mapping[str, Any] = MappingProxyType(
    {
        f"{MULTI_TURN}/gsm8k_multiturn_grpo": _turns(5),
        f"{MULTI_TURN}/gsm8k_multiturn_grpo_server": _turns(5),
        f"{MULTI_TURN}/search_multiturn_grpo": _turns(
            2, **{"data.shuffle": False, "actor_rollout_ref.rollout.multi_turn.format": "qwen"}
        ),
        f"{MULTI_TURN}/tool_config/gsm8k_tool_config": _tool(
            "verl.tools.gsm8k_tool.Gsm8kTool",
            "calc_gsm8k_reward",
            "A tool for calculating the reward of gsm8k. (1.0 if parsed answer is correct, 0.0 if parsed answer is "
            "incorrect or not correctly parsed)",
            {"answer": _text("The model's answer to the GSM8K math problem, must be a digits")},
        ),
        f"{MULTI_TURN}/tool_config/search_tool_config": _tool(
            "verl.tools.search_tool.SearchTool",
            "search",
            "Searches the web for relevant information based on the given query.",
            {
                "query_list": {
                    "type": "array",
                    "item": {"type": "string"},
                    "description": "A list of fully-formed semantic queries. The tool will return search results for "
                    "each query.",
                }
            },
            retrieval_service_url="http://127.0.0.1:8000/retrieve",
            timeout=30,
        ),
        "recipe/retool/sandbox_fusion_tool_config": _tool(
            "recipe.retool.retool.CustomSandboxFusionTool",
            "code_interpreter",
            "A tool for executing code.",
            {"code": _text("The code to execute.")},
            default_timeout=30,
        ),
    }
)
"""What each says, by its place in the repository without the suffix; of servers and limits only what is read here."""


def carried(place: str) -> str | None:
    """Return the text of verl's own file that a path names in full, or None where it is not one of these."""
    path = posixpath.normpath(place).removesuffix(".yaml").removesuffix(".yml")
    name = next((name for name in FILES if path == name or path.endswith(f"/{name}")), None)
    return None if name is None else json.dumps(FILES[name])
