"""What Prometheus scrapes: the metrics of the server, and unchanged those of its other programs.

Always true: each scrape requests one target; Prometheus adds the labels, so no text is parsed here.
"""

from __future__ import annotations

from typing import Any

import aiohttp
from fastapi import APIRouter, Request, Response

from rollout.core.types import ServerStatus
from rollout.observability.page.access import error_response
from rollout.observability.page.outgoing_http import get, outgoing_session
from rollout.observability.page.prometheus import render_metrics
from rollout.observability.page.state_cache import IDLE_S, StateCache

_TIMEOUT_S = 4.0
_MAX_BYTES = 16 << 20


def metrics_routes(cache: StateCache, router_key: str) -> APIRouter:
    """The routes below ``/metrics``; ``router_key`` is the bearer key for router and agents."""
    routes = APIRouter()

    @routes.get("/metrics")
    async def metrics() -> Response:
        """The metrics of server, driver and store."""
        await cache.refresh()
        return _text(render_metrics(cache.history.counters, cache.snapshot()))

    @routes.get("/metrics/targets")
    async def targets(request: Request) -> list[dict[str, Any]]:
        """All targets for Prometheus' ``http_sd_configs``, at the address of this page."""
        await cache.refresh()
        status = cache.status
        targets = [{"__metrics_path__": "/metrics", "instance": request.url.netloc}]
        if status is not None:
            for name in _targets(status, router_key):
                labels = {"server": status.name, "instance": f"{status.name}/{name}"}
                if name.startswith("engines/"):
                    labels["engine"] = name.removeprefix("engines/")
                targets.append({"__metrics_path__": f"/metrics/{name}", **labels})
        return [{"targets": [request.url.netloc], "labels": labels} for labels in targets]

    @routes.get("/metrics/{name:path}")
    async def metrics_of(name: str) -> Response:
        """The metrics of the router, of one worker of agents, or of one engine."""
        await cache.refresh(IDLE_S)
        target = _targets(cache.status, router_key).get(name) if cache.status else None
        if target is None:
            return error_response(404, "not_found", f"no target {name}: see /metrics/targets")
        try:
            async with outgoing_session(_TIMEOUT_S) as session:
                url, key = target
                raw = await get(session, f"{url}/metrics", key=key, max_bytes=_MAX_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return error_response(502, "no_metrics", f"{name} has no metrics: {error}")
        return _text(raw)

    return routes


def _targets(status: ServerStatus, router_key: str) -> dict[str, tuple[str, str]]:
    """URL and key of the router, of each worker of agents, and of each engine not fenced."""
    router = {"router": (status.router_url, router_key)} if status.router_url else {}
    agents = {f"agents/{num}": (url, router_key) for num, url in enumerate(status.agents_urls)}
    return (
        router
        | agents
        | {
            f"engines/{engine.engine_id}": (engine.endpoint.url, engine.access.sampling)
            for group in status.groups
            for engine in group.engines
            if engine.state != "fenced"
        }
    )


def _text(metrics: str | bytes) -> Response:
    return Response(metrics, media_type="text/plain; version=0.0.4; charset=utf-8")
