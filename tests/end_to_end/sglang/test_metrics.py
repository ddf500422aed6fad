"""SGLang's own metrics, passed on by the page of a server."""

from pathlib import Path

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from rollout.runtime.local import launch_local
from tests.support.paged import page_of, until
from tests.support.real_policy import one_engine, real_config

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
NUM_REQUESTS = 7
BODY = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}


def families(text: str) -> dict[str, Metric]:
    told = list(text_string_to_metric_families(text))
    assert len({one.name for one in told}) == len(told), "a family is told twice"
    return {one.name: one for one in told}


def count(family: Metric, **labels: str) -> float:
    """Sum of a counter's samples with these labels."""
    return sum(
        one.value
        for one in family.samples
        if one.name.endswith("_total") and labels.items() <= one.labels.items()
    )


def test_the_page_passes_on_sglangs_metrics_by_engine(models: list[Path], tmp_path: Path) -> None:
    groups = {name: one_engine(options={"enable-metrics": True}) for name in ("left", "right")}
    config = real_config(models[0], tmp_path, groups)
    with launch_local(config) as deployment, page_of(config) as page:
        policy = deployment["policy"]
        for _ in range(NUM_REQUESTS):
            httpx.post(f"{policy.url}/generate", json=BODY, timeout=60).raise_for_status()
        status = policy.status().result(30)
        urls = {one.engine_id: one.endpoint.url for g in status.groups for one in g.engines}
        own = {
            engine_id: families(httpx.get(f"{url}/metrics").text) for engine_id, url in urls.items()
        }
        paths = {
            one["labels"].get("engine", ""): one["labels"]["__metrics_path__"]
            for one in page.get("/metrics/targets").json()
        }
        told = {engine_id: families(page.get(paths[engine_id]).text) for engine_id in urls}
        router = families(page.get("/metrics/router").text)
    generated = "sglang:generation_tokens"
    for engine_id, families_of in own.items():
        assert told[engine_id].keys() >= families_of.keys()
        assert count(told[engine_id][generated]) == count(families_of[generated])
    assert count(router["router_admitted"]) == NUM_REQUESTS
    finished = [
        one for one in router["router_request_seconds"].samples if one.name.endswith("_count")
    ]
    assert sum(one.value for one in finished) == NUM_REQUESTS
    assert sum(count(one[generated]) for one in told.values()) >= 4 * NUM_REQUESTS


def test_the_page_has_the_throughput_and_the_queue_of_sglang(
    models: list[Path], tmp_path: Path
) -> None:
    groups = {"main": one_engine(options={"enable-metrics": True})}
    config = real_config(models[0], tmp_path, groups)
    seen: dict[str, float | None] = {}
    with (
        launch_local(config) as deployment,
        page_of(config) as page,
        page.stream("GET", "/api/changes"),  # engines are only requested while somebody watches
    ):

        def generates() -> bool:
            httpx.post(f"{deployment['policy'].url}/generate", json=BODY, timeout=60)
            (engine,) = page.get("/api/state").json()["engines"]
            seen.update({name: engine[name] for name in ("num_waiting", "tokens_per_s")})
            return bool(seen["tokens_per_s"])

        until(generates, "the engine reports tokens per second", timeout_s=60)
    assert seen["num_waiting"] == 0
