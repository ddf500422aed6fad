"""SGLang's control endpoints: pauses, memory, weights."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from engines.embedded.core.errors import Invalid
from engines.embedded.generation import command_rules
from engines.embedded.server.embedded_engine import EmbeddedEngine
from engines.embedded.server.request_runner import json_response, read_json
from engines.embedded.weights.disk_update import update_from_disk
from engines.embedded.weights.lora_adapters import read_adapter
from engines.embedded.weights.payload_tensors import NamedTensors, read_payload
from engines.protocol import MemoryTag, PauseMode
from engines.protocol.plain_text import differing_text
from engines.tensors.collective.bucket import content_of


def _ok(message: str, **more: Any) -> Response:
    return json_response({"success": True, "message": message, **more})


def _need(raw: dict[str, Any], name: str, kind: type) -> Any:
    value = raw.get(name)
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        raise Invalid(f"{name} must be given, as {kind.__name__}")
    return value


async def pause_generation(engine: EmbeddedEngine, request: Request) -> Response:
    raw = await read_json(request)
    mode = raw.get("mode", "abort")
    if mode not in list(PauseMode):
        raise Invalid(f"mode must be one of {', '.join(PauseMode)}: {mode!r}")
    await engine.run(lambda: engine.gate.pause(PauseMode(mode)))
    return json_response({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(engine: EmbeddedEngine, request: Request) -> Response:
    await read_json(request)
    await engine.run(engine.gate.resume)
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


async def flush_cache(engine: EmbeddedEngine, request: Request) -> Response:
    try:
        timeout_s = float(request.query_params.get("timeout", 0.0))
    except ValueError:
        raise Invalid("timeout must be a number of seconds") from None
    try:
        await engine.flush(timeout_s)
    except Invalid as refusal:
        return PlainTextResponse(f"{refusal}\n", 400)
    return PlainTextResponse("Cache flushed.\n")


async def abort_request(engine: EmbeddedEngine, request: Request) -> Response:
    """Exact ids only: SGLang also aborts every id that begins with the one given."""
    raw = await read_json(request)
    rid = raw.get("rid")
    if raw.get("abort_all"):
        await engine.run(engine.gate.abort_all)
    elif rid:
        await engine.run(lambda: engine.gate.abort(rid))
    return Response(status_code=200)


def _tags(raw: dict[str, Any]) -> list[MemoryTag]:
    names = raw.get("tags")
    if not names:
        return list(MemoryTag)
    if unknown := [name for name in names if name not in list(MemoryTag)]:
        raise Invalid(f"unknown memory tags {unknown}; known: {', '.join(MemoryTag)}")
    return [MemoryTag(name) for name in dict.fromkeys(names)]


async def release_memory_occupation(engine: EmbeddedEngine, request: Request) -> Response:
    tags = _tags(await read_json(request, is_optional=True))
    await engine.run(lambda: engine.gate.release(tags))
    return json_response(None)


async def resume_memory_occupation(engine: EmbeddedEngine, request: Request) -> Response:
    tags = _tags(await read_json(request, is_optional=True))
    await engine.run(lambda: engine.gate.resume_memory(tags))
    return json_response(None)


async def begin_weight_update(engine: EmbeddedEngine, request: Request) -> Response:
    await read_json(request)
    await engine.run(engine.gate.begin_update)
    return _ok("Weight update session opened.")


async def end_weight_update(engine: EmbeddedEngine, request: Request) -> Response:
    await read_json(request)
    await engine.run(engine.gate.end_update)
    engine.receiver.free()
    return _ok("Weight update session closed.")


def _how(raw: dict[str, Any]) -> dict[str, Any]:
    version = raw.get("weight_version")
    return {
        "flush": raw.get("flush_cache", True) is not False,
        "version": None if version is None else str(version),
        "abort_all": bool(raw.get("abort_all_requests")),
    }


async def _sent_tensors(engine: EmbeddedEngine, raw: dict[str, Any]) -> NamedTensors:
    payloads = _need(raw, "serialized_named_tensors", list)
    if len(payloads) != 1 or not isinstance(payloads[0], str):
        raise Invalid(f"needs one base64 payload (tensor parallel size 1): {len(payloads)}")
    load_format = raw.get("load_format")
    named: NamedTensors = await engine.run_blocking(lambda: read_payload(payloads[0], load_format))
    return named


async def update_weights_from_tensor(engine: EmbeddedEngine, request: Request) -> Response:
    command = "update_weights_from_tensor"
    raw = await read_json(request)
    engine.gate.require_session(command)
    named = await _sent_tensors(engine, raw)
    engine.weights.check((name, tensor.shape, tensor.dtype) for name, tensor in named)
    changes = engine.weights.changes(named)
    await engine.update(lambda: [change() for change in changes], command, **_how(raw))
    return _ok(f"Updated {len(named)} tensors.")


async def update_weights_from_disk(engine: EmbeddedEngine, request: Request) -> Response:
    raw = await read_json(request)
    path = _need(raw, "model_path", str)

    def load() -> None:
        update_from_disk(engine.weights, path, engine.mapped)
        engine.model_path = path  # with the weights, also if the caller has left meanwhile

    await engine.update(load, "update_weights_from_disk", **_how(raw))
    return _ok("Succeeded to update model weights.", num_paused_requests=0)


async def init_weights_update_group(engine: EmbeddedEngine, request: Request) -> Response:
    raw = await read_json(request)
    where = {
        "master_address": _need(raw, "master_address", str),
        "master_port": _need(raw, "master_port", int),
        "rank": _need(raw, "rank_offset", int),
        "world_size": _need(raw, "world_size", int),
        "group_name": raw.get("group_name", "weight_update_group"),
        "backend": raw.get("backend", "nccl"),
    }
    await engine.run_blocking(lambda: engine.receiver.groups.join(**where))
    return _ok("Succeeded to initialize custom process group.")


async def destroy_weights_update_group(engine: EmbeddedEngine, request: Request) -> Response:
    raw = await read_json(request)
    name = raw.get("group_name", "weight_update_group")
    await engine.run_blocking(lambda: engine.receiver.groups.leave(name))
    return _ok("Succeeded to destroy custom process group.")


async def update_weights_from_distributed(engine: EmbeddedEngine, request: Request) -> Response:
    command = "update_weights_from_distributed"
    raw = await read_json(request)
    engine.gate.require_session(command)
    receiver, group = engine.receiver, raw.get("group_name", "weight_update_group")
    plan = receiver.plan(content_of(raw))
    buffer = receiver.take(plan)  # not reused if this request is cancelled
    await engine.run_blocking(
        lambda: receiver.groups.receive(receiver.parts(plan, buffer), group_name=group)
    )
    await engine.update(lambda: receiver.deliver(plan, buffer), command, **_how(raw))
    return _ok(f"Updated {len(plan.pieces)} tensors.")


async def update_weight_version(engine: EmbeddedEngine, request: Request) -> Response:
    raw = await read_json(request)
    version = str(raw.get("new_version", ""))
    if not version:
        raise Invalid("new_version must be given")
    abort_all = raw.get("abort_all_requests", True) is not False
    await engine.run(lambda: engine.gate.set_version(version, abort_all=abort_all))
    return _ok(f"Weight version updated to {version}", new_version=version)


_ONE_RANK = {
    "role": "target",
    **{f"{kind}_rank": 0 for kind in ("tp", "dp", "pp")},
    **{f"{kind}_size": 1 for kind in ("tp", "dp", "pp")},
    "rank": 0,
    "size": 1,
}


async def weights_checker(engine: EmbeddedEngine, request: Request) -> Response:
    raw = await read_json(request, is_optional=True)
    action = raw.get("action", "checksum")
    weights = engine.weights
    actions = {
        "checksum": weights.checksum,
        "snapshot": weights.snapshot,
        "reset_tensors": weights.reset,
        "compare": weights.compare,
    }
    if str(action) not in actions:
        raise Invalid(f"unsupported action {action!r}")

    def run() -> Any:
        command_rules.require_weights(engine.gate.situation(), "weights_checker")
        return actions[action]()

    found = await engine.run(run)
    if action == "compare" and found:
        raise Invalid(differing_text(found))
    if action != "checksum":
        return _ok("Success.")
    digests, overall = found
    rank = {"checksums": digests, "per_gpu_checksum": overall, "parallelism_info": [_ONE_RANK]}
    num_bytes = weights.num_bytes
    return _ok("Success.", ranks=[rank], per_engine_checksum=overall, num_bytes=num_bytes)


async def load_lora_adapter(engine: EmbeddedEngine, request: Request) -> Response:
    raw = await read_json(request)
    name, path = _need(raw, "lora_name", str), _need(raw, "lora_path", str)
    config, named = await engine.run_blocking(lambda: read_adapter(path))
    return await _load_adapter(engine, name, config, named.items())


async def load_lora_adapter_from_tensors(engine: EmbeddedEngine, request: Request) -> Response:
    raw = await read_json(request)
    name, config = _need(raw, "lora_name", str), _need(raw, "config_dict", dict)
    return await _load_adapter(engine, name, config, await _sent_tensors(engine, raw))


async def _load_adapter(
    engine: EmbeddedEngine, name: str, config: dict[str, Any], named: Any
) -> Response:
    adapter = await engine.run(lambda: engine.adapters.load(name, config, named))
    return _adapters(engine, fingerprints=adapter.fingerprints)


async def unload_lora_adapter(engine: EmbeddedEngine, request: Request) -> Response:
    raw = await read_json(request)
    name = _need(raw, "lora_name", str)
    await engine.run(lambda: engine.adapters.unload(name))
    return _adapters(engine)


def _adapters(engine: EmbeddedEngine, **more: Any) -> Response:
    names = engine.adapters.names()
    return json_response({"success": True, "error_message": None, "loaded_adapters": names, **more})


async def weights_manifest(engine: EmbeddedEngine, request: Request) -> Response:
    return json_response(engine.weights.manifest())
