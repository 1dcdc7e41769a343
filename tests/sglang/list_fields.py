"""Run by SGLang's interpreter: print the fields of the requests that we send, as SGLang's own classes have them."""

import dataclasses
import json
import sys
from typing import Any

import msgspec
from sglang.api.v1.api_types import SamplingParams
from sglang.srt.managers import io_struct

CLASSES = {
    "POST /generate": io_struct.GenerateReqInput,
    "POST /abort_request": io_struct.AbortReq,
    "POST /pause_generation": io_struct.PauseGenerationReqInput,
    "POST /continue_generation": io_struct.ContinueGenerationReqInput,
    "POST /update_weights_from_disk": io_struct.UpdateWeightFromDiskReqInput,
    "POST /begin_weight_update": io_struct.BeginWeightUpdateReqInput,
    "POST /update_weights_from_tensor": io_struct.UpdateWeightsFromTensorReqInput,
    "POST /init_weights_update_group": io_struct.InitWeightsUpdateGroupReqInput,
    "POST /destroy_weights_update_group": io_struct.DestroyWeightsUpdateGroupReqInput,
    "POST /update_weights_from_distributed": io_struct.UpdateWeightsFromDistributedReqInput,
    "POST /end_weight_update": io_struct.EndWeightUpdateReqInput,
    "POST /release_memory_occupation": io_struct.ReleaseMemoryOccupationReqInput,
    "POST /resume_memory_occupation": io_struct.ResumeMemoryOccupationReqInput,
    "POST /weights_checker": io_struct.CheckWeightsReqInput,
}
WITHOUT_A_BODY = ("GET /health", "GET /model_info", "GET /server_info", "GET /v1/loads")
NOT_FOR_CALLERS = {"choice"}
"""Taken by the schema, and answered with an error by the engine."""


def fields_of(kind: Any) -> list[str]:
    """List a class's fields."""
    if dataclasses.is_dataclass(kind):
        return sorted(field.name for field in dataclasses.fields(kind))
    if hasattr(kind, "model_fields"):
        return sorted(kind.model_fields)
    return sorted(field.name for field in msgspec.structs.fields(kind))


found: dict[str, dict[str, list[str]]] = {route: {"fields": fields_of(kind)} for route, kind in CLASSES.items()}
found |= {route: {"fields": []} for route in WITHOUT_A_BODY}
found["POST /generate"]["sampling_params"] = sorted(set(SamplingParams.__annotations__) - NOT_FOR_CALLERS)
sys.stdout.write(json.dumps(found) + "\n")
