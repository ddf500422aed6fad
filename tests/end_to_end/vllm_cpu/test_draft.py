"""A draft model on real vLLM, a copy of the model: its tokens are accepted after an offload too."""

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
from rollout.core.types import EngineStatus
from rollout.runtime.handle import ServerHandle
from rollout.runtime.local import launch_local
from tests.support.contract import features_of
from tests.support.engine_keys import Keys, client_of
from tests.support.real_policy import DEADLINES, one_engine, real_config

pytestmark = [pytest.mark.exec, pytest.mark.vllm, pytest.mark.timeout(600)]
SAMPLING = SamplingParams(max_new_tokens=25, temperature=0.0, ignore_eos=True)
PROMPTS = [[60 + index, 61, 62] for index in range(20)]
COUNTER = re.compile(
    r"^vllm:spec_decode_num_(draft|accepted)_tokens_total{.*} (\S+)$", re.MULTILINE
)


@pytest.fixture
def policy(models: list[Path], tmp_path: Path) -> Iterator[ServerHandle]:
    draft = shutil.copytree(models[0], tmp_path / "draft")
    drafting = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    group = one_engine("vllm", options={"speculative-config": drafting})
    config = real_config(models[0], tmp_path / "logs", {"main": group})
    with launch_local(config) as deployment:
        yield deployment["policy"]


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


def test_a_draft_is_accepted_after_an_offload_and_a_push_as_before(
    policy: ServerHandle, models: list[Path]
) -> None:
    first = drafted(policy)
    assert first[0] == first[1] > 300
    with policy.offloaded() as window:
        window.push(load_file(models[0] / "model.safetensors"), version=1)
    assert drafted(policy) == first
    why = asyncio.run(why_lost_if_attached(engine_of(policy)))
    assert re.search(r"contains its draft /.*/draft, .*weights_cpu_backup to true", why)
