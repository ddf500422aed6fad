"""SGLang's own metrics, passed on by the page of a server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from rollout.config import RolloutConfig
from rollout.runtime.handle import ServerHandle
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


@pytest.fixture(scope="module")
def config(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> RolloutConfig:
    groups = {name: one_engine(options={"enable-metrics": True}) for name in ("left", "right")}
    return real_config(models[0], tmp_path_factory.mktemp("metrics"), groups)


@pytest.fixture(scope="module")
def policy(config: RolloutConfig) -> Iterator[ServerHandle]:
    with launch_local(config) as deployment:
        yield deployment["policy"]


def test_the_page_passes_on_sglangs_metrics_by_engine(
    policy: ServerHandle, config: RolloutConfig
) -> None:
    with page_of(config) as page:
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
    policy: ServerHandle, config: RolloutConfig
) -> None:
    seen: list[dict[str, Any]] = []
    with (
        page_of(config) as page,
        page.stream("GET", "/api/changes"),  # engines are only requested while somebody watches
    ):

        def generate() -> bool:
            httpx.post(f"{policy.url}/generate", json=BODY, timeout=60)
            seen[:] = page.get("/api/state").json()["engines"]
            return any(engine["tokens_per_s"] for engine in seen)

        until(generate, "an engine reports tokens per second", timeout_s=60)
    assert [engine["num_waiting"] for engine in seen] == [0, 0]
