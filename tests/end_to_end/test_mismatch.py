"""Faults in embedded engines behind the router, found by one comparison with the trainer."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from engines.protocol import Endpoint, SamplingParams
from rollout.config import RouterConfig
from rollout.core.samples import SampleGroup, all_samples
from rollout.driver.data.prompt import Prompt
from rollout.driver.driver import RolloutDriver
from rollout.driver.logprobs.comparison import LogprobReport
from rollout.router import Backend, RouterHost

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from tests.engines.embedded.engine_client import Asker, Server, connected  # noqa: E402

pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(240)]
PAGE = Path(__file__).parents[2] / "docs/how-to/mismatch.md"
ENGINES = "main-0", "main-1"


class World:
    """Two engines behind a router, their driver, and the trainer's model."""

    def __init__(
        self, folder: Path, model: Any, driver: RolloutDriver, askers: list[Asker]
    ) -> None:
        self.folder = folder
        self.model = model
        self._driver = driver
        self._askers = dict(zip(ENGINES, askers, strict=True))
        self._version = 0

    def train(self) -> Path:
        """A step that changes every weight a little; the new checkpoint."""
        self._version += 1
        with torch.no_grad():
            for weight in self.model.parameters():
                weight += 0.02 * weight.std(correction=0) * torch.randn_like(weight)
        self.model.save_pretrained(self.folder / f"step-{self._version}")
        return self.folder / f"step-{self._version}"

    async def load(self, engine_id: str, checkpoint: Path) -> None:
        await self._askers[engine_id].post(
            "/update_weights_from_disk",
            model_path=str(checkpoint),
            weight_version=str(self._version),
        )

    async def only_name_the_version(self, engine_id: str) -> None:
        """Report the new version without its weights."""
        await self._askers[engine_id].post("/update_weight_version", new_version=str(self._version))

    async def check(
        self, *, temperature: float = 0.8, trainers: float = 0.8, limit: float = 0.05
    ) -> LogprobReport:
        """One step: samples, the trainer's log-probs of them, the comparison."""
        sampling = SamplingParams(max_new_tokens=48, temperature=temperature, ignore_eos=True)
        prompts = [Prompt((11, 12, index)) for index in range(8)]
        groups = await self._driver.rollout(self._version, prompts, group_size=2, sampling=sampling)
        assert {one.engine_id for sample in all_samples(groups) for one in sample.engines} == {
            *ENGINES
        }
        rows = trainer_logprobs(self.model, groups, trainers)
        return await self._driver.check_logprobs(groups, rows, temperature=trainers, limit=limit)


def trainer_logprobs(model: Any, groups: list[SampleGroup], temperature: float) -> Any:
    """What the page's code computes."""
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (code,) = (block for block in blocks if "token_logprobs" in block)
    assert "temperature=0.8" in code
    names = {"model": model, "groups": groups}
    exec(code.replace("temperature=0.8", f"temperature={temperature}"), names)
    return names["logprobs"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rollout.testing.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", architecture="qwen3")


@pytest.fixture(scope="module")
def servers(checkpoint: Path) -> Iterator[list[Server]]:
    started = [Server(checkpoint) for _ in ENGINES]
    try:
        yield [server.wait_until_ready() for server in started]
    finally:
        for server in started:
            server.stop()


@pytest.fixture
async def world(servers: list[Server], checkpoint: Path, tmp_path: Path) -> AsyncIterator[World]:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    async with AsyncExitStack() as stack:
        askers = [await stack.enter_async_context(connected(server)) for server in servers]
        host = RouterHost(RouterConfig())
        url = (await host.start()).url
        stack.push_async_callback(host.stop, 1.0)
        members = [
            Backend(name, Endpoint("127.0.0.1", server.port))
            for name, server in zip(ENGINES, servers, strict=True)
        ]
        await host.set_members(1, members)
        await host.set_gate("open", weight_version=1)
        driver = await stack.enter_async_context(RolloutDriver(url, lambda sample: 1.0))
        made = World(tmp_path, model.eval(), driver, askers)
        pushed = made.train()
        for name in ENGINES:
            await made.load(name, pushed)
        yield made


async def test_equal_weights_agree_at_every_temperature(world: World) -> None:
    for temperature in (0.8, 1.0, 1.5):
        report = await world.check(temperature=temperature, trainers=temperature)
        assert report.mismatch is None
        assert report.overall.largest < 1e-3


async def test_an_engine_a_version_behind_is_found_in_one_step(world: World) -> None:
    await world.load("main-0", world.train())
    await world.only_name_the_version("main-1")
    report = await world.check()
    assert report.mismatch is not None
    assert report.mismatch.engine_id == "main-1"
    assert report.mismatch.weight_version == "2"
    assert report.by_engine["main-0"].largest < 1e-3 < report.by_engine["main-1"].mean
    await world.load("main-1", world.folder / "step-2")
    assert (await world.check()).mismatch is None


async def test_a_wrong_temperature_is_found_in_one_step(world: World) -> None:
    report = await world.check(temperature=0.5, trainers=1.0)
    assert report.mismatch is not None
    assert report.mismatch.engine_id == ""


@pytest.mark.parametrize("in_both", [False, True])
async def test_a_swapped_tensor_is_found_in_one_step(world: World, in_both: bool) -> None:
    good = world.train()
    first, second = (layer.mlp.up_proj.weight.data for layer in world.model.model.layers[:2])
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    world.model.save_pretrained(swapped := world.folder / "swapped")
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    await world.load("main-0", swapped if in_both else good)
    await world.load("main-1", swapped)
    report = await world.check()
    assert report.mismatch is not None
    assert report.mismatch.engine_id == ("" if in_both else "main-1")
