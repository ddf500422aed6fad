"""The metrics, alerts and dashboard queries, checked with Prometheus itself.

Needs ``prometheus`` and ``promtool`` (Debian's package ``prometheus``, or ``PROMETHEUS=/folder``
with both); skipped with a message otherwise.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from engines.process.tcp_ports import reserve_port
from rollout.runtime.handle import DeploymentHandle
from tests.support.paged import step, until
from tests.support.served_fakes import engines_of

FOLDER = os.environ.get("PROMETHEUS")
PROMETHEUS = shutil.which("prometheus", path=FOLDER)
PROMTOOL = shutil.which("promtool", path=FOLDER)
if PROMETHEUS is None or PROMTOOL is None:
    pytest.skip("there is no prometheus here (apt-get install prometheus)", allow_module_level=True)
MONITORING = files("rollout.observability.page") / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "grafana.json").read_text())
# Panels that need a driver, a store, a failure, a running phase or a GPU.
NEEDS_MORE = {
    "Reward",
    "Log-prob gap to the trainer, 99th percentile in nats",
    "Tokens per second",
    "Failures and recoveries",
    "Weight store behind",
    "Running phase",
    "GPU memory in use, by all programs",
    "GPUs busy",
}


def run_promtool(*words: str, stdin: str = "") -> str:
    done = subprocess.run(
        [PROMTOOL, *words], input=stdin, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_each_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    for file in (MONITORING / "alerts.yaml", Path(__file__).parent / "alerts_test.yaml"):
        (tmp_path / file.name).write_text(file.read_text())
    assert "SUCCESS" in run_promtool("check", "rules", str(tmp_path / "alerts.yaml"))
    assert "SUCCESS" in run_promtool("test", "rules", str(tmp_path / "alerts_test.yaml"))
    tested = yaml.safe_load((tmp_path / "alerts_test.yaml").read_text())["tests"]
    rules = yaml.safe_load((tmp_path / "alerts.yaml").read_text())["groups"][0]["rules"]
    fired = {t["alertname"] for case in tested for t in case["alert_rule_test"] if t["exp_alerts"]}
    assert fired == {rule["alert"] for rule in rules}


def test_promtool_finds_nothing_wrong_with_the_metrics(
    deployment: DeploymentHandle, page: httpx.Client
) -> None:
    step(deployment["policy"], deployment["policy"].status().result(30).weight_version + 1)
    text = page.get("/metrics").text
    assert run_promtool("check", "metrics", stdin=text) == ""
    families = [family.name for family in text_string_to_metric_families(text)]
    assert len(families) == len(set(families))


@pytest.fixture(scope="module")
def prometheus(
    page: httpx.Client, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """One that scrapes the targets of the page each second and watches the alerts."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "alerts.yaml").write_text((MONITORING / "alerts.yaml").read_text())
    targets = [{"url": str(page.base_url.join("/metrics/targets"))}]
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [{"job_name": "rollout", "http_sd_configs": targets}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    with reserve_port("127.0.0.1") as port:
        address = f"127.0.0.1:{port.port}"
    command = [
        PROMETHEUS,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
        httpx.Client(base_url=f"http://{address}", timeout=10.0, trust_env=False) as client,
    ):
        try:
            until(lambda: is_ready(client) or process.poll() is not None, "Prometheus is ready")
            assert process.poll() is None, (folder / "log").read_text()
            yield client
        finally:
            process.terminate()
            process.wait(20)


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").is_success
    except httpx.HTTPError:
        return False


def query_prometheus(prometheus: httpx.Client, expression: str) -> list[dict[str, Any]]:
    answer = prometheus.get("/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", (expression, answer)
    return answer["data"]["result"]


@pytest.mark.slow
def test_the_dashboard_shows_something_in_every_panel(
    deployment: DeploymentHandle, prometheus: httpx.Client
) -> None:
    policy = deployment["policy"]
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}

    def shows(expression: str) -> bool:
        httpx.post(f"{policy.url}/generate", json=body, timeout=30).raise_for_status()
        return bool(query_prometheus(prometheus, expression))

    version = policy.status().result(30).weight_version
    step(policy, version + 1)
    # The first step makes the series of its phases, which have no rate before the second.
    until(partial(shows, "rollout_phase_seconds_count"), "a scrape from between the steps")
    step(policy, version + 2)
    grows = ("rollout_steps_total", "rollout_phase_seconds_count", "router_request_seconds_count")
    for counter in grows:
        until(partial(shows, f"increase({counter}[1m]) > 0"), f"{counter} grows")
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            found = query_prometheus(prometheus, target["expr"].replace("$server", "policy"))
            assert found or panel["title"] in NEEDS_MORE, target["expr"]
            assert all(sample["value"][1] != "NaN" for sample in found), target["expr"]


def test_a_phase_that_hangs_is_seen_and_nothing_is_wrong_with_the_rules(
    deployment: DeploymentHandle, prometheus: httpx.Client
) -> None:
    policy = deployment["policy"]
    with engines_of(policy) as engines:
        engines["shared-1"].hold("pause_generation")
        pending = policy.phases.pause_generation()
        engines["shared-1"].wait_entered("pause_generation")
        running = 'rollout_phase_running_seconds{command="pause_generation"}'
        query = f"{running} / rollout_phase_budget_seconds > 0"
        until(partial(query_prometheus, prometheus, query), "the phase that runs is scraped")
        engines["shared-1"].open("pause_generation")
        pending.result(30)
        policy.phases.continue_generation().result(30)
    scraped = 'up{server="policy", engine="shared-1"}'
    until(partial(query_prometheus, prometheus, scraped), "each engine is a target")
    groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
