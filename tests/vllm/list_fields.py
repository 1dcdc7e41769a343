"""Run by vLLM's interpreter: print the fields that our requests may have, as its own classes and routes have them."""

import inspect
import json
import sys

import msgspec
from vllm.entrypoints.rl.online import api_router as rl
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.dev.server_info.api_router import show_server_info
from vllm.entrypoints.serve.dev.sleep.api_router import sleep
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu_worker import Worker

READ_BY_HAND = {
    "POST /inference/v1/abort_requests": {"fields": ["request_ids"]},
    "POST /collective_rpc": {"fields": ["args", "kwargs", "method", "timeout"]},
    "POST /wake_up": {"fields": [], "query": ["tags"]},
}
"""Their routes take the body, or the query, as it is."""
WITHOUT_A_BODY = ("POST /resume", "GET /version", "GET /weight_info", "GET /metrics", "GET /is_sleeping")


def parameters_of(route: object) -> list[str]:
    """List what a route takes by name."""
    return sorted(set(inspect.signature(route).parameters) - {"raw_request"})  # type: ignore[arg-type]


assert hasattr(Worker, "reload_weights")
found: dict[str, dict[str, list[str]]] = {
    "POST /inference/v1/generate": {
        "fields": sorted(GenerateRequest.model_fields),
        "sampling_params": sorted(
            field.name for field in msgspec.structs.fields(SamplingParams) if not field.name.startswith("_")
        ),
    },
    "POST /v1/load_lora_adapter": {"fields": sorted(LoadLoRAAdapterRequest.model_fields)},
    "POST /v1/unload_lora_adapter": {"fields": sorted(UnloadLoRAAdapterRequest.model_fields)},
    "POST /update_weight_version": {"fields": parameters_of(rl.update_weight_version)},
    "POST /sleep": {"fields": [], "query": parameters_of(sleep)},
    "POST /pause": {"fields": [], "query": parameters_of(rl.pause_generation)},
    "GET /server_info": {"fields": [], "query": parameters_of(show_server_info)},
    **READ_BY_HAND,
    **{route: {"fields": []} for route in WITHOUT_A_BODY},
}
sys.stdout.write(json.dumps(found) + "\n")
