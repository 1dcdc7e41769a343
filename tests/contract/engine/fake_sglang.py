"""An SGLang server in memory, behind a transport of httpx: it answers as the real one was recorded to.

It takes no field that SGLang 0.5.23 does not have, and has the habits that matter: aborts go by prefix of the id, what
waits at a pause is deaf to them, an in-place update counts the token under way to the new version, and a tensor of a
wrong shape ends it.
"""

import hashlib
from pathlib import Path
from typing import Any

import httpx

from flotilla.services.rollout.engines.scripted import log_prob_of
from flotilla.shared.weights.image.layout import ImageLayout
from tests.contract.engine.fake_server import Body, FakeServer, Sample, spans_of

MEMORY = ("weights", "kv_cache", "cuda_graph")
REQUESTS = Path(__file__).parents[2] / "goldens" / "sglang" / "requests.json"


class FakeSglang(FakeServer):
    """Serves a model directory; arguments as of ``FakeServer``."""

    def __init__(self, model: Path, *, slots: int = 12, context_length: int = 4096, token_seconds: float = 0) -> None:
        super().__init__(model, REQUESTS, slots=slots, context_length=context_length, token_seconds=token_seconds)
        self.tp_size = 1
        self._has_session = False
        self.groups: list[str] = []
        self.group_fails: str | None = None
        """What is wrong with groups: they are not formed, or what they carry."""
        self.broadcast: list[str] = []
        self.released: set[str] = set()
        self._has_weights = True
        self.damage: str | None = None
        """How the next load goes wrong: ``flip``, ``half`` or ``keep``."""
        self._held = tensors_in(model)
        self._routes = {
            "POST /generate": self._generate,
            "POST /abort_request": self._abort,
            "POST /pause_generation": self._pause,
            "POST /continue_generation": self._continue,
            "POST /update_weights_from_disk": self._update,
            "POST /weights_checker": self._check,
            "POST /begin_weight_update": self._begin,
            "POST /update_weights_from_tensor": self._update_by_handles,
            "POST /init_weights_update_group": self._join,
            "POST /destroy_weights_update_group": self._leave,
            "POST /update_weights_from_distributed": self._update_by_broadcast,
            "POST /end_weight_update": self._end,
            "POST /release_memory_occupation": self._release,
            "POST /resume_memory_occupation": self._resume,
            "GET /health": lambda _: None,
            "GET /model_info": lambda _: {"model_path": str(self.model), "weight_version": self.label},
            "GET /server_info": lambda _: {
                "model_path": str(self.model),
                "context_length": self.context_length,
                "tp_size": self.tp_size,
            },
            "GET /v1/loads": self._loads,
        }

    async def _generate(self, body: Body) -> Any:
        await self._goes_on.wait()
        assert self._has_weights and not self.released, "it samples with memory that nobody wrote to"
        rid, params = body["rid"], body["sampling_params"]
        if rid in self._samples:
            return httpx.Response(400, json={"error": {"message": f"Duplicate request ID: {rid}"}})
        if len(body["input_ids"]) + params["max_new_tokens"] > self.context_length:
            return httpx.Response(400, json={"error": {"message": "Requested token count exceeds the context"}})
        stops = () if params["ignore_eos"] else params.get("stop_token_ids", ())
        sample = Sample(body["input_ids"], params["max_new_tokens"], stops, is_greedy=not params["temperature"])
        reason = await self._sampled(rid, sample, relabels=lambda: self._mode == "in_place")
        reasons = {
            "abort": {"message": "Abort before prefill" if not sample.tokens else "Aborted"},
            "stop": {"matched": sample.tokens[-1:]},
            "length": {"length": len(sample.tokens)},
        }
        return _reply(rid, sample, {"type": reason, **reasons[reason]})

    def _abort(self, body: Body) -> None:
        # It is heard for an id that is known exactly, and then ends all that begin so.
        if body["rid"] in self._samples:
            for rid, sample in self._samples.items():
                sample.is_aborted |= rid.startswith(body["rid"])

    def _pause(self, body: Body) -> Body:
        self._mode = body["mode"]
        self._goes_on.clear()
        return {"message": "Generation paused successfully.", "status": "ok"}

    def _continue(self, body: Body) -> Body:
        self._goes_on.set()
        return {"message": "Generation continued successfully.", "status": "ok"}

    def _update(self, body: Body) -> Any:
        assert "weights" not in self.released, "weights need memory"
        why = self._misfit(Path(body["model_path"]))
        if why is not None:
            return httpx.Response(400, json={"success": False, "message": why})
        self._has_weights = True
        self._held, self.damage = damaged(tensors_in(Path(body["model_path"])), self._held, self.damage), None
        if body["flush_cache"] and self._mode == "in_place" and self._samples:
            return httpx.Response(400, json={"success": False, "message": "Flush cache failed."})
        self.label = body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def _check(self, body: Body) -> Any:
        assert body["action"] == "checksum"
        fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
        held: dict[str, bytes] = {}
        for name, data in self._held.items():
            own = next((name.replace(p, f) for f, parts in fused.items() for p in parts if f".{p}." in name), name)
            held[own] = held.get(own, b"") + data
        # As it does: the embedding is filled up to a multiple of 64 rows.
        held["model.embed_tokens.weight"] += bytes(4)
        sums = {name: hashlib.sha256(data).hexdigest()[:16] for name, data in held.items()}
        return {"success": True, "message": "Success.", "ranks": [{"checksums": sums, "per_gpu_checksum": "x"}]}

    def _release(self, body: Body) -> None:
        if self._goes_on.is_set() or any(sample.is_running for sample in self._samples.values()):
            # What runs is not asked whether it may: the scheduler ends, and with it the server.
            self.die()
            raise httpx.ReadError("")
        self.released, self._has_weights = set(body.get("tags") or MEMORY), False

    def _resume(self, body: Body) -> None:
        tags = set(body.get("tags") or MEMORY)
        if not tags <= self.released:
            self.die()
            raise httpx.ReadError("")
        self.released -= tags

    def _begin(self, _: Body) -> Any:
        if self._has_session:
            return httpx.Response(400, json={"success": False, "message": "a weight-update session is already open"})
        self._has_session = True
        return {"success": True, "message": "Success"}

    def _update_by_handles(self, body: Body) -> Any:
        if not self._has_session or len(body["serialized_named_tensors"]) != self.tp_size:
            return httpx.Response(400, json={"success": False, "message": "no session, or not a handle for each rank"})
        if body["flush_cache"] and self._mode == "in_place" and self._samples:
            return httpx.Response(400, json={"success": False, "message": "the cache was not flushed"})
        self.label = body.get("weight_version", self.label)
        return {"success": True, "message": "Success"}

    def _join(self, body: Body) -> Any:
        assert body["group_name"] not in self.groups, "a name that is used again blocks the scheduler for good"
        if self.group_fails:
            return _refusal(f"Failed to initialize custom process group: {self.group_fails}.")
        self.groups.append(body["group_name"])
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    def _leave(self, body: Body) -> Any:
        if body["group_name"] not in self.groups:
            return _refusal("The group to be destroyed does not exist.")
        self.groups.remove(body["group_name"])
        return {"success": True, "message": "Succeeded to destroy custom process group."}

    def _update_by_broadcast(self, body: Body) -> Any:
        assert not self._goes_on.is_set(), "an update of a server that samples waits for it"
        assert len(body["names"]) == len(body["dtypes"]) == len(body["shapes"])
        if not self._has_session or body["group_name"] not in self.groups:
            return _refusal("Failed to receive weights: no session, or no such group")
        if self.group_fails:
            return _refusal(self.group_fails)
        if any(self._shapes[name] != tuple(shape) for name, shape in zip(body["names"], body["shapes"], strict=True)):
            self._on_wrong_shapes()
        if body["flush_cache"] and self._mode == "in_place" and self._samples:
            return _refusal("the cache was not flushed")
        self.broadcast += body["names"]
        self.label = body.get("weight_version", self.label)
        return {"success": True, "message": "Success"}

    def _end(self, _: Body) -> Any:
        if not self._has_session:
            return httpx.Response(400, json={"success": False, "message": "no weight-update session is open"})
        self._has_session = False
        return {"success": True, "message": "Success"}

    def _on_wrong_shapes(self) -> None:
        self.die()
        raise httpx.ReadError("")

    def _loads(self, _: Body) -> Body:
        running = [sample for sample in self._samples.values() if sample.is_running]
        # A prompt that several share is kept once.
        prompts = {tuple(sample.prompt) for sample in running}
        used = sum(map(len, prompts)) + sum(len(sample.tokens) for sample in running)
        return {"loads": [{"num_running_reqs": len(running), "num_used_tokens": used}]}


def tensors_in(directory: Path) -> dict[str, bytes]:
    """Read the tensors of a directory, those that are fused in the order in which they are."""
    data = (directory / "model.safetensors").read_bytes()
    specs = ImageLayout.parse(data).tensors
    parts = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    rank = lambda spec: next((n for n, part in enumerate(parts) if f".{part}." in spec.name), -1)  # noqa: E731
    return {spec.name: data[spec.start : spec.end] for spec in sorted(specs, key=rank)}


def damaged(new: dict[str, bytes], old: dict[str, bytes], how: str | None) -> dict[str, bytes]:
    """Return what is held after a load that went wrong, or right."""
    if how == "keep":
        return old
    names = list(new)
    if how == "half":
        return new | {name: old[name] for name in names[len(names) // 2 :]}
    if how == "flip":
        last = new[names[-1]]
        return new | {names[-1]: last[:-1] + bytes([last[-1] ^ 1])}
    return new


def _refusal(message: str) -> httpx.Response:
    return httpx.Response(400, json={"success": False, "message": message})


def _reply(rid: str, sample: Sample, reason: Body) -> Body:
    triples = [[log_prob_of(token), token, None] for token in sample.tokens]
    facts: dict[str, Any] = {"id": rid, "finish_reason": reason, "completion_tokens": len(sample.tokens)}
    if sample.tokens:
        facts |= {"output_token_logprobs": triples, "weight_versions": spans_of(sample), "prompt_tokens": 1}
    return {"output_ids": sample.tokens, "meta_info": facts}
