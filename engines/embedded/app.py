"""The HTTP application: which path is answered by what, and how a refusal is written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engines.embedded import control, info, native, openai
from engines.embedded.engine import Engine
from engines.embedded.errors import Refusal, body
from engines.embedded.serving import json_response

Handler = Callable[[Engine, Request], Awaitable[Response]]
_GET, _POST, _EITHER = ["GET"], ["POST"], ["GET", "POST"]

ROUTES: list[tuple[str, list[str], Handler]] = [
    ("/ready", _GET, info.ready),
    ("/health", _GET, info.health),
    ("/health_generate", _GET, info.health_generate),
    ("/model_info", _GET, info.model_info),
    ("/get_model_info", _GET, info.model_info),
    ("/server_info", _GET, info.server_info),
    ("/get_server_info", _GET, info.server_info),
    ("/v1/loads", _GET, info.loads),
    ("/v1/models", _GET, info.models),
    ("/generate", ["POST", "PUT"], native.generate),
    ("/v1/completions", _POST, openai.completions),
    ("/v1/chat/completions", _POST, openai.chat_completions),
    ("/pause_generation", _POST, control.pause_generation),
    ("/continue_generation", _POST, control.continue_generation),
    ("/flush_cache", _EITHER, control.flush_cache),
    ("/abort_request", _POST, control.abort_request),
    ("/release_memory_occupation", _EITHER, control.release_memory_occupation),
    ("/resume_memory_occupation", _EITHER, control.resume_memory_occupation),
    ("/begin_weight_update", _POST, control.begin_weight_update),
    ("/end_weight_update", _POST, control.end_weight_update),
    ("/update_weights_from_tensor", _POST, control.update_weights_from_tensor),
    ("/update_weights_from_disk", _POST, control.update_weights_from_disk),
    ("/update_weights_from_peer", _POST, control.update_weights_from_peer),
    ("/weights_content", _GET, control.weights_content),
    ("/init_weights_update_group", _POST, control.init_weights_update_group),
    ("/destroy_weights_update_group", _POST, control.destroy_weights_update_group),
    ("/update_weights_from_distributed", _POST, control.update_weights_from_distributed),
    ("/update_weight_version", _POST, control.update_weight_version),
    ("/weights_checker", _EITHER, control.weights_checker),
    ("/weights_manifest", _GET, control.weights_manifest),
    ("/load_lora_adapter", _POST, control.load_lora_adapter),
    ("/load_lora_adapter_from_tensors", _POST, control.load_lora_adapter_from_tensors),
    ("/unload_lora_adapter", _POST, control.unload_lora_adapter),
]


def make_app(engine: Engine) -> FastAPI:
    """An application that serves ``engine``; the engine's life is the caller's business."""
    app = FastAPI(title="embedded engine", version=info.package_version())
    for path, methods, handler in ROUTES:
        for method in methods:  # each on its own: the ids of operations must differ
            app.add_api_route(
                path,
                _bound(engine, handler),
                methods=[method],
                name=handler.__name__,
                operation_id=f"{method.lower()}_{path.strip('/').replace('/', '_')}",
                response_model=None,
            )
    return app


def _bound(engine: Engine, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(engine, request)
        except Refusal as refusal:
            answer = body(str(refusal), refusal.status, refusal.kind)
            return json_response(answer, refusal.status)

    endpoint.__doc__ = handler.__doc__
    return endpoint
