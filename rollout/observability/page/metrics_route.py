"""The endpoint that Prometheus scrapes: the metrics of the server, of its router and its engines.

Always true: a target that does not answer in time is left out; each is requested once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

import aiohttp
from fastapi import APIRouter, Response

from rollout.observability.page.merged_metrics import merge_metrics
from rollout.observability.page.outgoing_http import get, outgoing_session
from rollout.observability.page.prometheus import render_metrics
from rollout.observability.page.state_cache import StateCache

_TIMEOUT_S = 4.0
_AT_ONCE = 64
_MAX_BYTES = 16 << 20

# URL of a metrics page, the bearer key for it ("" for none), labels for all its samples.
_Target = tuple[str, str, Mapping[str, str]]


def metrics_routes(cache: StateCache, router_key: str) -> APIRouter:
    """The route ``/metrics``; ``router_key`` is the bearer key for the router's metrics."""
    routes = APIRouter()

    @routes.get("/metrics")
    async def metrics(engines: bool = True) -> Response:
        """All metrics of server, driver, store, router and, unless ``engines=0``, engines."""
        await cache.refresh()
        now = cache.snapshot()
        server = {"server": now.get("server", "")}
        targets: list[_Target] = []
        if now.get("router_url"):
            targets.append((f"{now['router_url']}/metrics", router_key, server))
        if engines:
            targets += [
                (f"{engine['url']}/metrics", "", server | {"engine": engine["engine_id"]})
                for engine in now.get("engines", ())
                if engine["state"] != "fenced"
            ]
        pages = [(server, render_metrics(cache.counters, now)), *await _scrape(targets)]
        return Response(merge_metrics(pages), media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


async def _scrape(targets: Iterable[_Target]) -> list[tuple[Mapping[str, str], str]]:
    """The labels and text of each target that answers."""
    limit = asyncio.Semaphore(_AT_ONCE)
    async with outgoing_session(_TIMEOUT_S) as session:

        async def fetch(
            url: str, key: str, labels: Mapping[str, str]
        ) -> tuple[Mapping[str, str], str] | None:
            try:
                async with limit:
                    raw = await get(session, url, key=key, max_bytes=_MAX_BYTES)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
                return None
            return labels, raw.decode(errors="replace")

        pages = await asyncio.gather(*(fetch(*target) for target in targets))
    return [page for page in pages if page is not None]
