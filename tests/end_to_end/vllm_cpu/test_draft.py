"""A draft on real vLLM, a copy of the model: its tokens are accepted after an offload too, and that
they no longer are, when the model moves away from it, is a finding."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file

from engines.vllm.client import VllmClient
from rollout import SamplingParams
from rollout.core.types import DraftFigures, EngineStatus
from rollout.runtime.handle import DeploymentHandle, ServerHandle
from rollout.runtime.local import launch_local
from tests.support.contract import features_of
from tests.support.engine_keys import Keys, client_of
from tests.support.paged import page_of, until
from tests.support.real_policy import DEADLINES, one_engine, real_config

pytestmark = [pytest.mark.exec, pytest.mark.vllm, pytest.mark.timeout(600)]
SAMPLING = SamplingParams(max_new_tokens=25, temperature=0.0, ignore_eos=True)
PROMPTS = [[60 + index, 61, 62] for index in range(20)]
CHECKED = 30
"""Fewer tokens are drafted for the prompts with which the engine is checked."""
COUNTER = re.compile(
    r"^vllm:spec_decode_num_(draft|accepted)_tokens_total{.*} (\S+)$", re.MULTILINE
)


@pytest.fixture
def deployment(models: list[Path], tmp_path: Path) -> Iterator[DeploymentHandle]:
    draft = shutil.copytree(models[0], tmp_path / "draft")
    drafting = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    group = one_engine("vllm", options={"speculative-config": drafting})
    config = real_config(models[0], tmp_path / "logs", {"main": group})
    with launch_local(config) as launched:
        yield launched


@pytest.fixture
def policy(deployment: DeploymentHandle) -> ServerHandle:
    return deployment["policy"]


def engine_of(policy: ServerHandle) -> EngineStatus:
    (group,) = policy.status().result(30).groups
    return group.engines[0]


async def why_lost_if_attached(engine: EngineStatus) -> str:
    """What an attach of this server says, if its group keeps no copy of all weights."""
    async with aclosing(client_of(engine, VllmClient, deadlines=DEADLINES)) as client:
        return (await features_of(client)).why_draft_lost


def counters(policy: ServerHandle) -> dict[str, float]:
    engine = engine_of(policy)
    text = httpx.get(f"{engine.endpoint.url}/metrics", auth=Keys(engine)).text
    return {name: float(number) for name, number in COUNTER.findall(text)}


def drafted(policy: ServerHandle) -> tuple[float, float]:
    """Tokens that were drafted for the prompts, and those that were accepted."""
    before = counters(policy)
    for prompt in PROMPTS:
        assert len(policy.generate(prompt, SAMPLING).result(60).output_ids) == 25
    after = counters(policy)
    draft, accepted = (after[name] - before[name] for name in ("draft", "accepted"))
    return draft, accepted


def figures_of(policy: ServerHandle) -> DraftFigures:
    found = engine_of(policy).drafts
    assert found is not None
    return found


def test_a_draft_is_accepted_after_an_offload_and_a_push_as_before(
    deployment: DeploymentHandle,
    policy: ServerHandle,
    models: list[Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = drafted(policy)
    assert first[0] == first[1] > 300
    with policy.offloaded() as window:
        window.push(load_file(models[0] / "model.safetensors"), version=1)
    (before,) = window.report.drafts.values()
    assert (before.share, before.weight_version) == (1.0, 0)
    assert first[0] <= before.num_drafted < first[0] + CHECKED
    assert drafted(policy) == first
    until(lambda: figures_of(policy).num_drafted >= first[0], "the drafts are read")
    assert (figures_of(policy).share, figures_of(policy).fall) == (1.0, "")
    # The draft stays what it is, and the policy becomes another model.
    report = policy.push(load_file(models[1] / "model.safetensors"), version=2).result(120)
    (before,) = report.drafts.values()
    assert (before.share, before.weight_version) == (1.0, 1)
    draft, accepted = drafted(policy)
    assert accepted < draft / 2
    until(lambda: figures_of(policy).num_drafted >= draft, "the drafts are read")
    found = figures_of(policy)
    assert found.share == pytest.approx(accepted / draft, abs=CHECKED / draft)
    assert found.highest_share == 1.0
    since = "are right since weight version 2, and 100.0% were at version"
    assert f"{found.share:.1%} {since}" in found.fall
    # The log has the share of the first reading, perhaps in the middle of a reply.
    (logged,) = (text for text in caplog.messages if since in text)
    assert logged.startswith("engine main-0: of the tokens that its draft ")
    with page_of(deployment.config) as page:
        until(lambda: found.fall in page.get("/api/state").text, "the page shows it")
        (finding,) = page.get("/api/state").json()["findings"]
        assert finding["what"] == f"engine main-0: {found.fall}"
        metrics = page.get("/metrics").text
    assert f'draft_accepted_ratio{{engine="main-0",server="policy"}} {found.share}' in metrics
    why = asyncio.run(why_lost_if_attached(engine_of(policy)))
    assert re.search(r"contains its draft /.*/draft, .*weights_cpu_backup to true", why)
