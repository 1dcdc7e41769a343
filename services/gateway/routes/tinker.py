"""The Tinker API, as the client of that name speaks it (SDK 0.38); its own documentation describes it.

Not in ``/openapi.json``: the interface is another's, and part of it is protobuf.
"""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import FileResponse, RedirectResponse, StreamingResponse

from flotilla.services.gateway.routes.dependencies import Caller, Gateway
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.tinker.archives import archive
from flotilla.services.gateway.tinker.bodies import (
    MOST_BYTES,
    AskSample,
    CreateModel,
    CreateSampler,
    CreateSession,
    LoadWeights,
    OfModel,
    OfSession,
    OptimStep,
    Retrieve,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    Ttl,
    WeightsInfo,
)
from flotilla.services.gateway.tinker.packing import WORTHWHILE_BYTES, ZSTD, is_packed, pack, takes_packed, unpack
from flotilla.services.gateway.tinker.tinker import Tinker
from flotilla.shared.errors import InvalidRequest, NotFound, Unauthorized
from flotilla.shared.net.authorisation.tokens import callback_key, is_same_secret
from flotilla.shared.net.authorisation.tokens import signature as signature_of
from flotilla.shared.schemas.tinker import TinkerLedgers, TinkerRun, TinkerSequence
from flotilla.shared.tinker import queue
from flotilla.shared.tinker.paths import Kind, SavedPath
from flotilla.shared.tinker.records import Lora, Saved
from flotilla.shared.tinker.sessions import MOST_LISTED, Run

router = APIRouter(include_in_schema=False)

PROTOBUF = "application/x-protobuf"
CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"
DOWNLOAD = "/downloads/{run}/{kind}/{name}/{file}"
ARCHIVE = "archive.tar"
DOWNLOAD_SECONDS = 3600
KINDS = {Kind.TRAINING: "training", Kind.SAMPLER: "sampler", Kind.EXTERNAL: "external"}


async def _tinker(request: Request) -> Tinker:
    served: Tinker | None = request.state.tinker
    if served is None:
        raise NotFound("this gateway has no base model: FLOTILLA_TINKER_MODEL names one")
    return served


Served = Annotated[Tinker, Depends(_tinker)]
Text = Annotated[str, Query(max_length=200)]


@router.get("/healthz")
async def healthz(tinker: Served) -> dict[str, str]:
    """Report that the API is served."""
    return {"status": "ok"}


@router.post("/client/config")
async def client_config(tinker: Served) -> dict[str, bool]:
    """Tell the client how to ask: with plain keys, what is computed in zstd, one wait for each answer."""
    return {
        "pjwt_auth_enabled": False,
        "parallel_fwdbwd_chunks": True,
        "proto_compress_fwdbwd": True,
        "sample_use_retrieve_futures": False,
        "custom_loss_server_side": False,
        "sample_join_sampling_session": False,
    }


@router.post("/client/dynamic_config")
async def dynamic_config(tinker: Served) -> dict[str, bool]:
    """Tell the client what may change while it runs."""
    return {"sample_cancel_enabled": False}


@router.post("/telemetry")
async def telemetry(tinker: Served) -> dict[str, str]:
    """Take what the client says of itself, and keep nothing of it."""
    return {"status": "accepted"}


@router.get("/get_server_capabilities")
async def capabilities(tinker: Served) -> dict[str, list[dict[str, object]]]:
    """List the one base model."""
    facts = {"model_name": tinker.base_model, "max_context_length": tinker.context_tokens}
    return {"supported_models": [{**facts, "trainable": True, "sampleable": True}]}


@router.post("/create_session")
async def create_session(body: CreateSession, tinker: Served, caller: Caller) -> dict[str, str]:
    """Open a session."""
    session_id = await tinker.create_session(caller, body.tags, body.sdk_version)
    return {"type": "create_session", "session_id": session_id}


@router.post("/session_heartbeat")
async def heartbeat(body: OfSession, tinker: Served, caller: Caller) -> dict[str, str]:
    """Note that a session's client is there."""
    await tinker.heartbeat(caller, body.session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish(session_id: str, tinker: Served, caller: Caller) -> None:
    """End a session."""
    await tinker.finish_session(caller, session_id)


@router.post("/create_model")
async def create_model(body: CreateModel, tinker: Served, caller: Caller, gateway: Gateway) -> dict[str, str]:
    """Make a model."""
    request = await tinker.create_model(caller, body)
    await _record_creation(gateway, request.model_id, base_model=body.base_model)
    return _future(request)


@router.post("/get_info")
async def get_info(body: OfModel, tinker: Served, caller: Caller) -> dict[str, object]:
    """Return what a model is."""
    model = await tinker.model(caller, body.model_id)
    return {
        "type": "get_info",
        "model_data": {"model_name": tinker.base_model, "tokenizer_id": tinker.base_model},
        "model_id": model.model_id,
        "is_lora": model.lora is not None,
        "lora_rank": None if model.lora is None else model.lora.rank,
        "model_name": tinker.base_model,
    }


@router.post("/forward_backward")
async def forward_backward(request: Request, tinker: Served, caller: Caller) -> dict[str, str]:
    """Compute losses, and gradients unless it is forward only."""
    body = await request.body()
    if not is_packed(request.headers.get("content-encoding", "")):
        return _future(await tinker.forward_backward(caller, body))
    # What is unpacked is not counted among the bodies that are held, so there is little of it at a time.
    async with tinker.unpacking.of(caller.actor):
        plain = await asyncio.to_thread(unpack, body, MOST_BYTES)
        return _future(await tinker.forward_backward(caller, plain))


@router.post("/optim_step")
async def optim_step(body: OptimStep, tinker: Served, caller: Caller) -> dict[str, str]:
    """Update a model."""
    return _future(await tinker.optim_step(caller, body))


@router.post("/unload_model")
async def unload_model(body: OfModel, tinker: Served, caller: Caller) -> dict[str, str]:
    """Keep a model on the disk alone until it is asked for again."""
    return _future(await tinker.unload(caller, body))


@router.post("/save_weights")
async def save_weights(body: SaveWeights, tinker: Served, caller: Caller) -> dict[str, str]:
    """Save a model to train from it."""
    return _future(await tinker.save(caller, body))


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(body: SaveForSampler, tinker: Served, caller: Caller) -> dict[str, str]:
    """Save a model to sample from it."""
    return _future(await tinker.save_for_sampler(caller, body))


@router.post("/save_weights_external")
async def save_weights_external(body: SaveExternal, tinker: Served, caller: Caller) -> dict[str, str]:
    """Save a model's adapter, in peft's format, to be downloaded."""
    return _future(await tinker.save(caller, body))


@router.post("/load_weights")
async def load_weights(body: LoadWeights, tinker: Served, caller: Caller, gateway: Gateway) -> dict[str, str]:
    """Continue from what was saved."""
    request = await tinker.load(caller, body)
    if request.seq == 0:
        await _record_creation(gateway, request.model_id, path=body.path, optimizer=body.optimizer)
    elif request.is_new:
        await _record(gateway, request.model_id, "load", path=body.path, optimizer=body.optimizer)
    return _future(request)


@router.post("/create_sampling_session")
async def create_sampling_session(body: CreateSampler, tinker: Served, caller: Caller) -> dict[str, str]:
    """Open a sampling session."""
    sampler_id = await tinker.create_sampler(caller, body)
    return {"type": "create_sampling_session", "sampling_session_id": sampler_id}


@router.get("/samplers/{sampler_id}")
async def sampler(sampler_id: str, tinker: Served, caller: Caller) -> dict[str, str | None]:
    """Return what a sampling session samples from."""
    found = await tinker.sampler(caller, sampler_id)
    return {"sampler_id": sampler_id, "base_model": tinker.base_model, "model_path": found.path}


@router.post("/asample")
async def asample(body: AskSample, tinker: Served, caller: Caller) -> dict[str, object]:
    """Sample, or score a prompt."""
    request_id, sequence_ids = await tinker.sample(caller, body)
    return {"request_id": request_id, "sample_sequence_ids": sequence_ids}


@router.post("/retrieve_future")
async def retrieve_future(request: Request, body: Retrieve, tinker: Served, caller: Caller) -> Response:
    """Wait for an answer; 408 after a while, and the client asks again. In zstd for who takes that."""
    found = await tinker.answer(caller, body.request_id)
    if found is None:
        content = b'{"type": "try_again", "queue_state": "active"}'
        return Response(content, status_code=408, media_type="application/json")
    media_type = PROTOBUF if found.form is queue.Form.PROTOBUF else "application/json"
    content, headers = found.content, {"Vary": "Accept-Encoding"}
    if len(content) >= WORTHWHILE_BYTES and takes_packed(request.headers.get("accept-encoding", "")):
        content, headers = await asyncio.to_thread(pack, content), {**headers, "Content-Encoding": ZSTD}
    return Response(content, headers=headers, media_type=media_type)


@router.get("/sequences/{sequence_id}")
async def sequence(sequence_id: str, tinker: Served, caller: Caller) -> TinkerSequence:
    """Return which weights sampled each token of a sequence. Ours alone."""
    runs = [TinkerRun.model_validate(each.model_dump()) for each in await tinker.sampled(caller, sequence_id)]
    return TinkerSequence(sequence_id=sequence_id, base_model=tinker.base_model, runs=tuple(runs))


@router.get("/ledger")
async def ledger(tinker: Served, caller: Caller) -> TinkerLedgers:
    """Count what became of requests. Ours alone."""
    return TinkerLedgers(owners=tuple(await tinker.ledgers(caller)))


@router.post("/weights_info")
async def weights_info(body: WeightsInfo, tinker: Served, caller: Caller) -> dict[str, object]:
    """Return what a saved model is."""
    saved = await asyncio.to_thread(tinker.saved.read, caller, SavedPath.read(body.tinker_path))
    facts: dict[str, object] = {"base_model": tinker.base_model, "is_lora": saved.lora is not None}
    lora = saved.lora
    if lora is not None:
        facts |= {"lora_rank": lora.rank, "train_mlp": lora.train_mlp, "train_attn": lora.train_attn}
    return facts | {"train_unembed": lora is None}


@router.get("/training_runs")
async def training_runs(
    tinker: Served,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    offset: Annotated[int, Query(ge=0)] = 0,
) -> dict[str, object]:
    """List the caller's models, newest first."""
    limit = min(limit, MOST_LISTED)
    count, found = await tinker.runs(caller, offset, limit)
    rows = await asyncio.to_thread(_runs, tinker, found)
    return {"training_runs": rows, "cursor": {"offset": offset, "limit": limit, "total_count": count}}


@router.get("/training_runs/{run}")
async def training_run(run: str, tinker: Served, caller: Caller) -> dict[str, object]:
    """Return what a model is."""
    await tinker.model(caller, run)
    _, found = await tinker.runs(caller, model_id=run)
    return (await asyncio.to_thread(_runs, tinker, found))[0]


@router.get("/training_runs/{run}/checkpoints")
async def checkpoints(run: str, tinker: Served, caller: Caller) -> dict[str, object]:
    """List what was saved of a model, oldest first."""
    await tinker.model(caller, run)
    found = await asyncio.to_thread(tinker.saved.of_run, run)
    return {"checkpoints": [_checkpoint(saved) for saved in found]}


@router.get("/checkpoints")
async def all_checkpoints(
    tinker: Served,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0)] = 0,
) -> dict[str, object]:
    """List what was saved of the caller's newest models."""
    _, newest = await tinker.runs(caller)
    runs = [run.model.model_id for run in newest]
    found = await asyncio.to_thread(lambda: [saved for run in runs for saved in tinker.saved.of_run(run)])
    rows = [_checkpoint(saved) for saved in found[offset : offset + limit]]
    return {"checkpoints": rows, "cursor": {"offset": offset, "limit": limit, "total_count": len(found)}}


@router.get(f"{CHECKPOINT}/external_weights_urls")
async def external_weights_urls(
    request: Request, run: str, kind: Kind, name: str, tinker: Served, caller: Caller, gateway: Gateway
) -> dict[str, object]:
    """Sign an address for each file: whoever has one downloads that file, without a key, for an hour."""
    path = SavedPath(run, kind, name)
    await asyncio.to_thread(tinker.saved.read, caller, path)
    if kind is not Kind.EXTERNAL:
        raise InvalidRequest(f"{path} is not to be downloaded by file: save_weights_external makes what is")
    expires = int(gateway.clock.now()) + DOWNLOAD_SECONDS
    names = await asyncio.to_thread(tinker.saved.files, path)
    return {"urls": {file: _address(request, path, file, expires) for file in names}, "expires": _time(expires)}


@router.get(f"{CHECKPOINT}/archive", status_code=302, response_class=RedirectResponse)
async def archive_url(
    request: Request, run: str, kind: Kind, name: str, tinker: Served, caller: Caller, gateway: Gateway
) -> RedirectResponse:
    """Lead to the signed address of all files as a tar, as earlier clients ask for it."""
    path = SavedPath(run, kind, name)
    await asyncio.to_thread(tinker.saved.read, caller, path)
    expires = int(gateway.clock.now()) + DOWNLOAD_SECONDS
    headers = {"Expires": format_datetime(datetime.fromtimestamp(expires, UTC), usegmt=True)}
    return RedirectResponse(_address(request, path, ARCHIVE, expires), 302, headers)


async def _signed(
    run: str, kind: str, name: str, file: str, gateway: Gateway, expires: Text = "", signature: Text = ""
) -> None:
    """Let in whoever shows an address that was signed here and is not too old."""
    expected = _signature(gateway, f"{run}/{kind}/{name}/{file}", expires)
    if not is_same_secret(signature, expected) or int(expires) <= gateway.clock.now():
        raise Unauthorized("this address was not signed here, or is too old: ask for another one")


@router.get(DOWNLOAD, dependencies=[Depends(_signed)])
async def download(run: str, kind: Kind, name: str, file: str, tinker: Served) -> Response:
    """Send one file of what was saved, or all as a tar."""
    path = SavedPath(run, kind, name)
    names, directory = await asyncio.to_thread(tinker.saved.files, path), tinker.saved.directory(path)
    if file == ARCHIVE:
        size, pieces = await asyncio.to_thread(archive, directory, names)
        return StreamingResponse(pieces, media_type="application/x-tar", headers={"Content-Length": str(size)})
    if file not in names:
        raise NotFound(f"{path} has no file {file}")
    return FileResponse(directory / file, media_type="application/octet-stream")


@router.delete(CHECKPOINT, status_code=204)
async def delete(run: str, kind: Kind, name: str, tinker: Served, caller: Caller, gateway: Gateway) -> None:
    """Delete what was saved."""
    await asyncio.to_thread(tinker.saved.delete, caller, SavedPath(run, kind, name))
    await _record(gateway, run, "delete_checkpoint", name=f"{kind}/{name}")


@router.put(f"{CHECKPOINT}/ttl", status_code=204)
async def set_ttl(run: str, kind: Kind, name: str, body: Ttl, tinker: Served, caller: Caller, gateway: Gateway) -> None:
    """Return how long it is kept."""
    expires = None if body.ttl_seconds is None else gateway.clock.now() + body.ttl_seconds
    await asyncio.to_thread(tinker.saved.change, caller, SavedPath(run, kind, name), expires=expires)
    await _record(gateway, run, "date_checkpoint", name=f"{kind}/{name}", ttl_seconds=body.ttl_seconds)


@router.post(f"{CHECKPOINT}/publish", status_code=204)
async def publish(run: str, kind: Kind, name: str, tinker: Served, caller: Caller, gateway: Gateway) -> None:
    """Let every token of this fleet read it."""
    await asyncio.to_thread(tinker.saved.change, caller, SavedPath(run, kind, name), is_public=True)
    await _record(gateway, run, "publish_checkpoint", name=f"{kind}/{name}")


@router.delete(f"{CHECKPOINT}/publish", status_code=204)
async def unpublish(run: str, kind: Kind, name: str, tinker: Served, caller: Caller, gateway: Gateway) -> None:
    """Let its owner alone read it."""
    await asyncio.to_thread(tinker.saved.change, caller, SavedPath(run, kind, name), is_public=False)
    await _record(gateway, run, "unpublish_checkpoint", name=f"{kind}/{name}")


async def _record_creation(gateway: GatewayState, run: str, **facts: object) -> None:
    """Record that a model was made; a client that hears nothing asks again, so nothing is recorded a second time."""
    if not await gateway.store.audit(f"experiments/{run}", limit=1):
        await _record(gateway, run, "create", **facts)


async def _record(gateway: GatewayState, run: str, action: str, **facts: object) -> None:
    async with gateway.store.transaction() as change:
        gateway.repository.stage_audit(change, run, action, **facts)


def _address(request: Request, path: SavedPath, file: str, expires: int) -> str:
    gateway: GatewayState = request.state.gateway
    signed = _signature(gateway, f"{path.run}/{path.kind}/{path.name}/{file}", str(expires))
    url = request.url_for("download", run=path.run, kind=path.kind.value, name=path.name, file=file)
    return f"{url}?expires={expires}&signature={signed}"


def _signature(gateway: GatewayState, what: str, expires: str) -> str:
    return signature_of(callback_key(gateway.settings.token, "tinker downloads"), expires, what.encode())


def _future(request: queue.Request) -> dict[str, str]:
    return {"request_id": request.id, "model_id": request.model_id}


def _runs(tinker: Tinker, found: Sequence[Run]) -> list[dict[str, object]]:
    return [_run(tinker, run) for run in found]


def _run(tinker: Tinker, run: Run) -> dict[str, object]:
    model = run.model
    lora: Lora | None = model.lora
    saved = {each: [s for s in tinker.saved.of_run(model.model_id) if f"/{each}/" in s.path] for each in KINDS}
    last = {kind: _checkpoint(found[-1]) if found else None for kind, found in saved.items()}
    return {
        "training_run_id": model.model_id,
        "base_model": tinker.base_model,
        "model_owner": model.owner,
        "is_lora": lora is not None,
        "lora_rank": None if lora is None else lora.rank,
        "last_request_time": _time(run.seen),
        "last_checkpoint": last[Kind.TRAINING],
        "last_sampler_checkpoint": last[Kind.SAMPLER],
        "user_metadata": model.user_metadata,
    }


def _checkpoint(saved: Saved) -> dict[str, object]:
    path = SavedPath.read(saved.path)
    return {
        "checkpoint_id": f"{path.kind}/{path.name}",
        "checkpoint_type": KINDS[path.kind],
        "time": _time(saved.created),
        "tinker_path": saved.path,
        "size_bytes": saved.num_bytes,
        "public": saved.is_public,
        "user_metadata": saved.user_metadata,
        "expires_at": None if saved.expires is None else _time(saved.expires),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
