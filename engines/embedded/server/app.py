"""The HTTP application: the handler of each path, and the reply for a refused request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engines.embedded.core.errors import EngineRefusal, Invalid
from engines.embedded.server import control_api, generate_api, info_api, openai_api
from engines.embedded.server.embedded_engine import EmbeddedEngine
from engines.embedded.server.request_runner import dumps, json_response
from engines.tensors.collective.bucket import BroadcastRefused

Handler = Callable[[EmbeddedEngine, Request], Awaitable[Response]]
_GET, _POST, _EITHER = ["GET"], ["POST"], ["GET", "POST"]

ROUTES: list[tuple[str, list[str], Handler]] = [
    ("/ready", _GET, info_api.ready),
    ("/health", _GET, info_api.health),
    ("/health_generate", _GET, info_api.health_generate),
    ("/model_info", _GET, info_api.model_info),
    ("/get_model_info", _GET, info_api.model_info),
    ("/server_info", _GET, info_api.server_info),
    ("/get_server_info", _GET, info_api.server_info),
    ("/v1/loads", _GET, info_api.loads),
    ("/v1/models", _GET, info_api.models),
    ("/generate", ["POST", "PUT"], generate_api.generate),
    ("/v1/completions", _POST, openai_api.completions),
    ("/v1/chat/completions", _POST, openai_api.chat_completions),
    ("/pause_generation", _POST, control_api.pause_generation),
    ("/continue_generation", _POST, control_api.continue_generation),
    ("/flush_cache", _EITHER, control_api.flush_cache),
    ("/abort_request", _POST, control_api.abort_request),
    ("/release_memory_occupation", _EITHER, control_api.release_memory_occupation),
    ("/resume_memory_occupation", _EITHER, control_api.resume_memory_occupation),
    ("/begin_weight_update", _POST, control_api.begin_weight_update),
    ("/end_weight_update", _POST, control_api.end_weight_update),
    ("/update_weights_from_tensor", _POST, control_api.update_weights_from_tensor),
    ("/update_weights_from_disk", _POST, control_api.update_weights_from_disk),
    ("/init_weights_update_group", _POST, control_api.init_weights_update_group),
    ("/destroy_weights_update_group", _POST, control_api.destroy_weights_update_group),
    ("/update_weights_from_distributed", _POST, control_api.update_weights_from_distributed),
    ("/update_weight_version", _POST, control_api.update_weight_version),
    ("/weights_checker", _EITHER, control_api.weights_checker),
    ("/weights_manifest", _GET, control_api.weights_manifest),
    ("/load_lora_adapter", _POST, control_api.load_lora_adapter),
    ("/load_lora_adapter_from_tensors", _POST, control_api.load_lora_adapter_from_tensors),
    ("/unload_lora_adapter", _POST, control_api.unload_lora_adapter),
]


def make_app(engine: EmbeddedEngine) -> Starlette:
    """An application that serves ``engine``; the caller starts and stops the engine."""
    routes = [
        Route(path, _bound(engine, handler), methods=methods) for path, methods, handler in ROUTES
    ]
    schema = Route("/openapi.json", _schema)
    return Starlette(routes=[*routes, schema], exception_handlers={HTTPException: _refused})


async def _schema(request: Request) -> Response:
    """The paths, in the form of OpenAPI; bodies are not described."""
    paths: dict[str, dict[str, object]] = {
        path: {
            method.lower(): {"summary": handler.__name__, "responses": {"200": {"description": ""}}}
            for method in methods
        }
        for path, methods, handler in ROUTES
    }
    info = {"title": "embedded engine", "version": info_api.PACKAGE_VERSION}
    return json_response({"openapi": "3.1.0", "info": info, "paths": paths})


async def _refused(request: Request, error: Exception) -> Response:
    """The reply of FastAPI, on which SGLang is built."""
    assert isinstance(error, HTTPException)
    return Response(
        dumps({"detail": error.detail}), error.status_code, error.headers, "application/json"
    )


def _bound(engine: EmbeddedEngine, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(engine, request)
        except (EngineRefusal, BroadcastRefused) as error:
            refusal = error if isinstance(error, EngineRefusal) else Invalid(str(error))
            return json_response(refusal.body(), refusal.status)

    return endpoint
