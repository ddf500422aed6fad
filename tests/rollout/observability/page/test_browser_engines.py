"""What the page shows of engines, in a real browser: findings, load, GPUs, logs and events."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from rollout.cli.main import app
from rollout.config.run_dir import RunFolder
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from tests.support.browser import open_page, shot
from tests.support.nvml import nvml_double
from tests.support.paged import page_of, step
from tests.support.served_fakes import config, launched

pytestmark = pytest.mark.slow

GIB = 1 << 30
MARKUP = "<img src=x onerror=document.title='broken'>"


def url_of(deployment: DeploymentHandle) -> str:
    with page_of(deployment.config) as client:
        return str(client.base_url)


@pytest.fixture
def opened(browser: Any, deployment: DeploymentHandle) -> Iterator[Any]:
    with open_page(browser, url_of(deployment)) as page:
        yield page


@pytest.fixture(scope="module")
def on_a_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentHandle]:
    """A fake engine in a process of its own, which has a log file; its GPU is NVML's double."""
    folder = tmp_path_factory.mktemp("process")
    groups = {"main": {"num_engines": 1, "engine": {"kind": "fake", "gpus": 1}}}
    with nvml_double(folder / "gpus") as nvml, pytest.MonkeyPatch.context() as patch:
        nvml.add(0, "GPU-here", 80 * GIB, busy_percent=37)
        nvml.hold(0, 20 * GIB)
        patch.setenv("CUDA_VISIBLE_DEVICES", "0")
        handle = launch_local(config(folder, groups))
        try:
            yield handle
        finally:
            handle.stop()


def test_a_fenced_engine_is_a_finding_with_the_advice_that_doctor_gives(
    browser: Any, tmp_path: Path
) -> None:
    groups = {"main": {"num_engines": 2}}
    page_keys, health = {"control_key": "steer"}, {"recover": False}
    with launched(launch_local, tmp_path, groups, page=page_keys, health=health) as handle:
        with page_of(handle.config) as client:
            steer = {"authorization": "Bearer steer"}
            client.post("/api/fence/main-1", headers=steer).raise_for_status()
        run = str(RunFolder.of(handle.config).path)
        (report,) = json.loads(CliRunner().invoke(app, ["doctor", run, "--json"]).output)
        found = report["findings"][0]
        with open_page(browser, url_of(handle)) as page:
            page.wait_for_selector(".finding.wrong")
            shown = page.inner_text(".finding.wrong >> nth=0")
            assert found["what"] in shown
            assert (
                page.locator(".finding >> nth=0").locator("li").all_inner_texts()
                == (found["advice"])
            )
            page.click("summary:text-is('Why')")
            assert found["details"][0] in page.inner_text(".finding.wrong >> nth=0")
            shot(page, "findings")
            page.click("button:text-is('log of main-1')")
            page.wait_for_selector("#log[open] #log-title:text-is('Log of main-1')")


def test_a_server_without_a_fault_has_no_advice(opened: Any) -> None:
    opened.wait_for_selector("#findings .quiet:has-text('nothing is wrong')")
    assert not opened.locator(".finding").count()


def test_the_tokens_that_an_engine_generates_are_in_its_row(
    opened: Any, deployment: DeploymentHandle
) -> None:
    is_tokens = (
        "form => [...document.querySelectorAll('#rows td:nth-child(6)')]"
        ".some(cell => RegExp(form).test(cell.textContent))"
    )
    opened.wait_for_function(is_tokens, arg="^0$")
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3000}}
    httpx.post(f"{deployment['policy'].url}/generate", json=body).raise_for_status()
    opened.wait_for_function(is_tokens, arg="^[1-9]")
    assert opened.locator("#rows td:nth-child(5)").all_inner_texts() == ["0", "0", "0"]


def test_without_a_gpu_there_are_no_columns_for_gpus(opened: Any) -> None:
    opened.wait_for_selector("#rows tr")
    assert not opened.locator(".gpu:visible").count()


def test_a_gpus_memory_and_use_are_in_the_row_of_its_engine(
    browser: Any, on_a_gpu: DeploymentHandle
) -> None:
    """With a double of NVML; not run on a GPU."""
    with open_page(browser, url_of(on_a_gpu)) as page:
        page.wait_for_selector("#rows td.gpu")
        headers = page.locator("#engine-table th.gpu:visible").all_inner_texts()
        assert headers == ["GPU memory", "GPU use"]
        assert page.locator("#rows td.gpu").all_inner_texts() == ["20.0 GiB of 80.0 GiB", "37 %"]
        shot(page, "gpus")


def test_a_gpus_memory_and_use_are_metrics_of_its_engine(on_a_gpu: DeploymentHandle) -> None:
    with page_of(on_a_gpu.config) as client:
        text = client.get("/metrics").raise_for_status().text
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if {"engine": "main-0", "gpu": "GPU-here"}.items() <= sample.labels.items()
    }
    assert values == {
        "rollout_gpu_used_bytes": 20 * GIB,
        "rollout_gpu_bytes": 80 * GIB,
        "rollout_gpu_busy_ratio": 0.37,
    }


def test_a_log_is_followed_and_what_is_in_it_is_text(
    browser: Any, on_a_gpu: DeploymentHandle
) -> None:
    (log,) = RunFolder.of(on_a_gpu.config).path.rglob("*.log")
    with open_page(browser, url_of(on_a_gpu)) as page:
        page.click("button[aria-label='Log of main-0']")
        page.wait_for_selector("#log-lines:has-text('listens on')")
        with log.open("a") as lines:
            lines.write(f"{MARKUP}\n" + "".join(f"line {number}\n" for number in range(300)))
        page.wait_for_selector("#log-lines:has-text('line 299')")
        shot(page, "log")
        # At most 200 lines; the reader sees the end.
        assert page.inner_text("#log-note") == "The last 200 lines."
        at_end = "box => box.scrollTop + box.clientHeight >= box.scrollHeight - 4"
        assert page.eval_on_selector("#log-lines", at_end)
        with log.open("a") as lines:
            lines.write(f"{MARKUP}\n")
        page.wait_for_selector(f'#log-lines:has-text("{MARKUP}")')
        assert not page.locator("#log-lines img").count()
        assert page.title() != "broken"
        page.keyboard.press("Escape")
        page.wait_for_selector("#log", state="hidden")


def test_a_log_that_cannot_be_read_is_explained(opened: Any) -> None:
    opened.wait_for_selector("#rows tr")
    opened.route("**/log?*", lambda route: route.fulfill(json={"tail": "(no log: node-2 is lost)"}))
    opened.click("button[aria-label='Log of apart-0']")
    opened.wait_for_selector("#log-lines:has-text('node-2 is lost')")


def test_pushes_are_events_and_changes_of_the_gate_are_folded(
    opened: Any, deployment: DeploymentHandle
) -> None:
    policy = deployment["policy"]
    first = policy.status().result(30).weight_version + 1
    step(policy, first)
    opened.wait_for_selector(f"#events li:has-text('pushed version {first}')")
    assert not opened.locator("#events li.gate").count()
    opened.check("#with-gate")
    folded = opened.locator("#events li.gate details").first
    assert not folded.locator("p").first.is_visible()
    folded.locator("summary").click()
    opened.wait_for_selector("#events li.gate p:visible")
    shown = opened.locator("#events li.gate p:visible").count()
    # What is open stays open when events come.
    step(policy, first + 1)
    opened.wait_for_selector(f"#events li:has-text('pushed version {first + 1}')")
    assert opened.locator("#events li.gate p:visible").count() >= shown
