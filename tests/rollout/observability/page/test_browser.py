"""The page in a real browser: its drawings, its updates, and its use with a keyboard.

Needs Debian's ``chromium`` (or ``CHROMIUM=/path``) and Playwright; otherwise it is skipped.
Screenshots go to ``$SCREENSHOTS`` if that is set.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from rollout.cli.main import app
from rollout.config.run_dir import RunFolder
from rollout.control.server.server import RolloutServer
from rollout.core.samples import Sample, SampleGroup
from rollout.driver.logprobs.gap_figures import GapSums
from rollout.driver.stream.shown_samples import shown_samples
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from tests.rollout.observability.timeline.spans import rank_push
from tests.support.browser import open_page, shot
from tests.support.paged import page_of, step, until
from tests.support.served_fakes import engines_of, launched

pytestmark = pytest.mark.slow


@pytest.fixture
def opened(browser: Any, deployment: DeploymentHandle) -> Iterator[Any]:
    """The page, drawn; any error in its console fails the test."""
    with open_page(browser, url_of(deployment)) as page:
        yield page


def url_of(deployment: DeploymentHandle) -> str:
    with page_of(deployment.config) as client:
        return str(client.base_url)


def text(page: Any, selector: str) -> str:
    return str(page.inner_text(selector))


def test_it_shows_engines_steps_and_curves(opened: Any, deployment: DeploymentHandle) -> None:
    policy = deployment["policy"]
    version = policy.status().result(30).weight_version + 1
    step(policy, version)
    samples = shown_samples([SampleGroup(0, [Sample([7], text="<i>four</i>", reward=0.5)])], 4)
    metrics = {"rollout/reward/mean": 0.625, "rollout/seconds": 2.0}
    figures = {"step": version, "metrics": metrics, "samples": samples}
    httpx.post(f"{policy.url}/figures", json=figures).raise_for_status()
    opened.wait_for_selector(f"#version:text-is('{version}')")
    opened.wait_for_selector("#sample-rows td:has-text('<i>four</i>')")
    assert "ids 7" in text(opened, "#sample-rows")
    opened.wait_for_selector("#curves figcaption:has-text('Reward')")
    assert "0.625" in text(opened, "#curves")
    assert text(opened, "#phase") == "serving"
    assert text(opened, "#gate") == "open"
    assert opened.locator("#rows tr").count() == 3
    assert opened.locator("#steps tr").count() >= 1
    drawn = opened.evaluate(
        "() => { const c = document.getElementById('lanes');"
        " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        " let n = 0; for (let i = 3; i < d.length; i += 4) if (d[i]) n += 1; return n; }"
    )
    assert drawn > 1000
    shot(opened, "two-groups")


def test_it_shows_what_a_push_sent_and_the_versions_of_adapters(
    browser: Any, deployment: DeploymentHandle
) -> None:
    policy = deployment["policy"]
    version = policy.status().result(30).weight_version + 1
    step(policy, version)
    with open_page(browser, url_of(deployment)) as page:
        spans = rank_push(time.time(), version=version)
        policy._caller.call(RolloutServer.record_push, spans).result(30)
        page.wait_for_selector("#push-rows tr")
        cells = page.locator("#push-rows tr").first.locator("td").all_inner_texts()
        assert cells[:5] == [str(version), "by_value delta", "400 B", "1.56 %", "0.50 s"]
        assert not page.locator("#adapters").is_visible()
        with page_of(deployment.config) as client:
            now = client.get("/api/state?fresh=1").json()
        # As the router names them; the empty name is that of requests without one.
        now["gate"]["adapters"] = {"": "math@7", "math": "math@7", "code": "code@9"}
        body = many_engines(now, 2, 1)
        page.route(
            "**/api/changes",
            lambda route: route.fulfill(body=body, content_type="text/event-stream"),
        )
        page.reload()
        page.wait_for_selector("#adapters:text-is('math 7, code 9')")
        shot(page, "pushes")


@pytest.mark.parametrize("width", [1280, 400])
def test_a_healthy_step_moves_nothing_on_the_page(
    browser: Any, deployment: DeploymentHandle, width: int
) -> None:
    policy = deployment["policy"]
    version = policy.status().result(30).weight_version + 1
    with open_page(browser, url_of(deployment), width=width) as page:
        page.evaluate(
            "() => { const tops = window.tops = new Set();"
            " const look = () => { tops.add(document.getElementById('lanes-box')"
            ".getBoundingClientRect().top + window.scrollY); requestAnimationFrame(look); };"
            " look(); }"
        )
        policy.offload().result(30)
        page.wait_for_selector("#phase:has-text('offloaded'), #phase:has-text('mixed')")
        step(policy, version)
        page.wait_for_selector(f"#version:text-is('{version}')")
        page.wait_for_selector("#phase:has-text('serving')")
        assert len(page.evaluate("() => [...window.tops]")) == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_report_of_a_run_has_the_same_charts(
    browser: Any, deployment: DeploymentHandle, tmp_path: Path
) -> None:
    policy, out = deployment["policy"], tmp_path / "report.html"
    version = policy.status().result(30).weight_version + 1
    step(policy, version)
    values = {"rollout/reward/mean": 0.5, "rollout/reward/max": 0.875}
    figures = {"step": version, "metrics": values, "lengths": {"64": 3, "128": 1}}
    httpx.post(f"{policy.url}/figures", json=figures).raise_for_status()

    def is_whole() -> bool:
        words = ["report", str(RunFolder.of(deployment.config).path), "-o", str(out), "--json"]
        done = CliRunner().invoke(app, words)
        # The spans of the step and its figures are in two files.
        has_step = done.exit_code == 0 and json.loads(done.stdout)["num_steps"] > 0
        return has_step and "0.875" in out.read_text()

    until(is_whole, "the step is recorded")
    with open_page(browser, out.as_uri(), ready="#charts figcaption") as report:
        captions = report.locator("#charts figcaption").all_inner_texts()
        assert "0.875" in next(one for one in captions if one.startswith("Reward"))
        assert any(
            one.startswith("Seconds of each phase") and "release_memory_occupation" in one
            for one in captions
        )
        assert report.locator("figure:has-text('Output lengths') rect").count() == 2
        assert "Tokens per second" in text(report, "main > p:has-text('No data')")


def test_a_chart_tells_the_value_under_the_pointer_and_its_text_is_not_stretched(
    browser: Any, deployment: DeploymentHandle
) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    with page_of(deployment.config) as client:
        now = client.get("/api/state").json()
        now["figures"] = [
            {"step": number, "metrics": {"rollout/reward/mean": number / 8}} for number in (1, 2, 3)
        ]
        hello = {"run_id": "three", "can_steer": False}
        events = {"hello": hello, "state": now}
        body = "".join(
            f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events.items()
        )
        page.route(
            "**/api/changes",
            lambda route: route.fulfill(body=body, content_type="text/event-stream"),
        )
        page.goto(str(client.base_url))
    chart = page.locator("#curves figure").first
    chart.wait_for()
    assert "0.375" in chart.inner_text()
    box = chart.locator("svg").bounding_box()

    def shows_what_is_under_the_pointer() -> bool:
        # The chart may move once more, when what is above it is drawn.
        chart.locator("svg").hover(position={"x": 0.55 * box["width"], "y": 0.5 * box["height"]})
        return "0.250 at 2" in chart.inner_text()

    until(shows_what_is_under_the_pointer, "the value under the pointer")
    page.mouse.move(1, 1)
    assert "0.375" in chart.inner_text()
    stretch = "svg => { const m = svg.getScreenCTM(); return m.a / m.d; }"
    assert chart.locator("svg").evaluate(stretch) == pytest.approx(1)
    page.close()


@pytest.mark.parametrize("width", [360, 3200])
def test_a_narrow_and_a_wide_window_need_no_scrolling_sideways(
    browser: Any, deployment: DeploymentHandle, width: int
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    with page_of(deployment.config) as client:
        page.goto(str(client.base_url))
    page.wait_for_selector("#rows tr")
    shot(page, f"width-{width}")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    page.close()


def test_it_shows_how_far_log_probs_are_from_the_trainers(
    opened: Any, deployment: DeploymentHandle
) -> None:
    sums = GapSums()
    sums.add([0.0002, -0.02, 0.025, 5.0])
    gaps = {"shared-0": sums.histogram(), "shared-1": sums.histogram()}
    figures = {"step": 12, "metrics": {"logprob_gap/mean": 0.0375}, "logprob_gaps": gaps}
    httpx.post(f"{deployment['policy'].url}/figures", json=figures).raise_for_status()
    opened.wait_for_selector("#curves figcaption:has-text('tokens of step 12')")
    assert "0.037" in text(opened, "#curves")
    label = opened.get_attribute("#curves figure:last-child svg", "aria-label")
    assert label.endswith(": up to 0.001: 2, up to 0.03: 4, up to 10.0: 2")
    shot(opened, "logprob-gaps")


def test_a_phase_that_hangs_is_seen_with_its_deadline_ticking(
    opened: Any, deployment: DeploymentHandle
) -> None:
    policy = deployment["policy"]
    with engines_of(policy) as engines:
        engines["shared-1"].hold("pause_generation")
        pending = policy.phases.pause_generation()
        engines["shared-1"].wait_entered("pause_generation")
        opened.wait_for_selector(".phase .who:has-text('waits for 1 of 3: shared-1')")
        first = text(opened, ".phase .clock")
        opened.wait_for_function(
            "before => document.querySelector('.phase .clock').textContent !== before", arg=first
        )
        shot(opened, "hanging")
        engines["shared-1"].open("pause_generation")
        pending.result(30)
        policy.phases.continue_generation().result(30)
    opened.wait_for_selector("#running .quiet:has-text('No phase runs')")


def test_a_keyboard_is_enough_to_open_a_step_and_to_move_in_time(
    opened: Any, deployment: DeploymentHandle
) -> None:
    policy = deployment["policy"]
    step(policy, policy.status().result(30).weight_version + 1)
    opened.wait_for_selector("#steps button.open")
    first = opened.get_attribute("#steps button.open >> nth=0", "aria-label")
    opened.focus(f"[aria-label='{first}']")
    # The focus stays while the page changes under it.
    step(policy, policy.status().result(30).weight_version + 1)
    opened.wait_for_selector(
        f"#steps tr:not(:has([aria-label='{first}'])) + tr [aria-label='{first}']"
    )
    opened.keyboard.press("Enter")
    opened.wait_for_selector("#step[open] tbody tr")
    assert first == f"Open {text(opened, '#step-title').lower()}"
    assert "pause_generation" in text(opened, "#step")
    opened.keyboard.press("Escape")
    opened.wait_for_selector("#step", state="hidden")
    opened.focus("#lanes")
    opened.keyboard.press("ArrowLeft")
    assert opened.get_attribute("#follow", "aria-pressed") == "false"
    opened.keyboard.press("Home")
    assert opened.get_attribute("#follow", "aria-pressed") == "true"


def test_the_filter_finds_an_engine(opened: Any) -> None:
    opened.wait_for_selector("#rows tr")
    opened.fill("#filter", "apart")
    assert opened.locator("#rows tr").count() == 1
    opened.fill("#filter", "")
    assert opened.locator("#rows tr").count() == 3


def test_everything_that_can_be_used_has_a_name(opened: Any) -> None:
    nameless = opened.evaluate(
        "() => [...document.querySelectorAll('button, input, select, canvas, table, section')]"
        ".filter(e => !(e.ariaLabel || e.getAttribute('aria-labelledby') || e.labels?.length"
        " || e.textContent.trim())).map(e => e.outerHTML)"
    )
    assert nameless == []
    assert opened.get_attribute("html", "lang") == "en"


def test_without_a_control_key_the_page_offers_no_control(opened: Any) -> None:
    opened.wait_for_selector("#rows tr")
    assert opened.locator("#rows button:has-text('fence')").count() == 0
    assert not opened.is_visible("#control")
    assert not opened.is_visible("#stop")


def test_with_the_control_key_an_engine_is_fenced_after_a_question(
    browser: Any, tmp_path: Path
) -> None:
    groups = {"main": {"num_engines": 2}}
    with (
        launched(launch_local, tmp_path, groups, page={"control_key": "steer"}) as handle,
        open_page(browser, url_of(handle)) as page,
    ):
        page.click("#control")
        page.fill("#key", "steer")
        page.click("#ask-yes")
        page.click("button[aria-label='Fence main-1']")
        page.wait_for_selector("#ask[open] #ask-text:has-text('Fence main-1')")
        page.click("#ask-yes")
        page.wait_for_selector("#events li.bad:has-text('main-1 fenced')")


def test_when_the_server_is_gone_the_page_is_grey_and_says_since_when(
    browser: Any, tmp_path: Path
) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    with launched(launch_local, tmp_path, {"main": {"num_engines": 2}}) as handle:
        with page_of(handle.config) as client:
            page.goto(str(client.base_url))
        page.wait_for_selector("#link.live")
        page.wait_for_selector("#rows tr")
        handle["policy"].phases.pause_generation().result(30)
        page.wait_for_selector("#phase:text-is('paused')")
        assert not page.locator("body.gone").count()
    page.wait_for_selector("body.gone #link:has-text('last heard')")
    assert page.title().startswith("GONE · policy")
    assert page.get_attribute("#icon", "href") == "icon-trouble.svg"
    first = text(page, "#link")
    page.wait_for_function("old => document.querySelector('#link').textContent !== old", arg=first)
    # Its last state stays, without its colours.
    assert page.locator("#rows tr").count() == 2
    style = page.evaluate("() => getComputedStyle(document.querySelector('main')).filter")
    assert style == "grayscale(1)"
    shot(page, "gone")
    page.close()


def test_a_page_that_is_connected_again_is_live_and_not_grey(
    browser: Any, deployment: DeploymentHandle
) -> None:
    page = browser.new_page()
    with page_of(deployment.config) as client:
        body = "retry: 100\n" + many_engines(client.get("/api/state?fresh=1").json(), 2, 1)
        # Each connection ends after its first events.
        page.route(
            "**/api/changes",
            lambda route: route.fulfill(body=body, content_type="text/event-stream"),
        )
        page.goto(str(client.base_url))
    page.wait_for_selector("body.gone #link.lost")
    page.unroute("**/api/changes")
    page.wait_for_selector("body:not(.gone) #link.live")
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_in_dark(
    browser: Any, deployment: DeploymentHandle, scheme: str
) -> None:
    """WCAG's contrast of at least 4.5 to 1, of every kind of text on the page."""
    with open_page(browser, url_of(deployment), scheme=scheme) as page:
        page.wait_for_selector("#rows tr")
        worst = page.evaluate(CONTRAST)
        assert worst["ratio"] >= 4.5, worst


def test_it_stays_quick_with_256_engines(browser: Any, deployment: DeploymentHandle) -> None:
    """256 engines and ten steps, in the form that the server sends."""
    with page_of(deployment.config) as client:
        body = many_engines(client.get("/api/state?fresh=1").json(), 256, 10)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.route(
            "**/api/changes",
            lambda route: route.fulfill(body=body, content_type="text/event-stream"),
        )
        page.goto(str(client.base_url))
    page.wait_for_function("() => document.querySelectorAll('#rows tr').length === 256")
    took_ms = page.evaluate(
        "() => { const times = []; const select = document.getElementById('span');"
        " for (let i = 0; i < 10; i += 1) { const began = performance.now();"
        " select.dispatchEvent(new Event('change')); times.push(performance.now() - began); }"
        " return times.sort((a, b) => a - b)[5]; }"
    )
    shot(page, "many")
    # The lane on top is the one that the phase waits for, of 256.
    page.hover("#lanes", position={"x": 600, "y": 54})
    assert page.inner_text("#tip").startswith("main-200: ")
    page.close()
    assert took_ms < 250, "drawing all lanes once"


def many_engines(now: dict[str, Any], num: int, num_steps: int) -> str:
    """A stream of events with copies of the first engine, and what they did in some steps."""
    first = now["engines"][0]
    now["engines"] = [first | {"engine_id": f"main-{index}"} for index in range(num)]
    phases = [
        "pause_generation",
        "flush_cache",
        "release_memory_occupation",
        "onload_weights",
        "update_weights",
        "verify",
    ]
    spans = [
        {
            "kind": "engine",
            "name": phase,
            "source": "policy/main",
            "engine_id": f"main-{index}",
            "start_s": now["now_s"] - 10 * (num_steps - number) + place,
            "elapsed_s": 0.5 + index / 1000,
            "outcome": "ok",
        }
        for number in range(num_steps)
        for place, phase in enumerate(phases)
        for index in range(num)
    ]
    began = {"start_s": now["now_s"] - 60, "elapsed_s": 60.0, "outcome": "running"}
    now["running"] = [
        {"kind": "phase", "name": "pause_generation", "source": "policy", **began},
        {"kind": "engine", "name": "pause_generation", "source": "policy/main", **began}
        | {"engine_id": "main-200"},
    ]
    events = {"hello": {"run_id": "many", "can_steer": False}, "state": now, "spans": spans}
    return "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events.items())


CONTRAST = """() => {
  const channel = (v) => {
    v /= 255;
    return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  };
  const light = (c) => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
  const parse = (s) => (s.match(/[\\d.]+/g) || []).map(Number);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] > 0.9) return c;
    }
    return [255, 255, 255];
  };
  const words = 'h1,h2,p,dt,dd,td,th,b,button,label,span,li,figcaption';
  let worst = { ratio: 99 };
  for (const e of document.querySelectorAll(words)) {
    if (!e.textContent.trim() || !e.offsetParent) continue;
    if (e.closest('[hidden],dialog,.visually-hidden,.skip')) continue;
    const a = light(parse(getComputedStyle(e).color)), b = light(behind(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst.ratio) worst = { ratio, text: e.textContent.slice(0, 40), tag: e.tagName };
  }
  return worst;
}"""
