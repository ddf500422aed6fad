"""A training script over fake engines that may be killed at any moment, and started again.

``python -m tests.support.journal_trainer FOLDER HOOK NUM_PROMPTS``: it trains on two data sets in
turns until both end, saves a checkpoint in every third step, and continues from the last one, so
with either of them.  ``FOLDER/tokens``
gets a byte for each token that an engine generates, ``FOLDER/checkpoint`` what was trained on.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import rollout
from engines.fake import FakeEngine
from engines.fake.engine.request import FakeRequest
from engines.fake.http_fake import HttpFakeLauncher
from engines.launch import EngineSpec
from engines.protocol import Endpoint, SamplingParams
from rollout.core.samples import all_samples
from rollout.driver.client.session import Session
from rollout.driver.stream.options import RolloutOptions
from rollout.runtime.local import launch_local
from tests.support.builders import push
from tests.support.driving import source
from tests.support.served_fakes import config

# clock: a tool takes its time, so that a kill meets requests at all places.

NUM_TOKENS, TOKEN_S, IN_FLIGHT = 24, 0.02, 16
NAMES = ("left", "right")
BATCH: dict[str, Any] = {
    "num_groups": 4,
    "group_size": 2,
    "sampling": SamplingParams(max_new_tokens=NUM_TOKENS),
    "options": RolloutOptions(mode="async"),
}
OBSERVED = [7, 8, 9]


class CountingEngine(FakeEngine):
    """It appends a byte to a file for each of its tokens."""

    descriptor = -1

    async def _step(self, request: FakeRequest) -> None:
        before = len(request.output_ids)
        await super()._step(request)
        if len(request.output_ids) > before:
            os.write(self.descriptor, b".")


def make(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    return CountingEngine(spec.engine_id, endpoint=endpoint, token_s=TOKEN_S)


async def turns(session: Session) -> None:
    """Turns of 8 tokens, with a slow tool between them."""
    while session.num_left:
        await session.generate(SamplingParams(max_new_tokens=8))
        await asyncio.sleep(0.1)
        session.observe(OBSERVED, " tool ")


def main(folder: Path, hook: str, num_prompts: int) -> None:
    """Train until both sources end."""
    CountingEngine.descriptor = os.open(folder / "tokens", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    checkpoint = folder / "checkpoint"
    saved: dict[str, Any] = {"step": -1, "trained": []}
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
    step, trained = saved["step"], saved["trained"]
    hooks = rollout.Hooks(reward=lambda sample: 1.0, generate=turns if hook == "session" else None)
    settings = config(folder / "run", {"main": {"num_engines": 2}})
    with launch_local(settings, launcher=HttpFakeLauncher(make)) as deployment:
        policy = deployment["policy"]
        policy.push(push(1)).result(60)
        with rollout.Driver(
            policy.url, hooks=hooks, max_in_flight=IN_FLIGHT, journal=folder / "journal"
        ) as driver:
            sources = [source(num_prompts, num_epochs=1, name=name) for name in NAMES]
            print("begun", flush=True)
            ended = set[int]()
            while len(ended) < len(sources):
                step += 1
                data = sources[step % 2]
                groups = driver.rollout(step, data, **BATCH).result(60)
                if not groups:
                    ended.add(step % 2)
                for sample in all_samples(groups):
                    sample.check()
                    trained.append([NAMES[step % 2], sample.metadata["number"], sum(sample.mask)])
                stream = driver._inner.stream_of(data)
                assert not (found := stream.auditor.findings(stream.pending)), found
                if step % 3 == 2:
                    for one in sources:
                        driver.state_of(one)
                    save(checkpoint, {"step": step, "trained": trained})
            save(checkpoint, {"step": step, "trained": trained, "is_over": True})


def save(path: Path, state: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(state))
    part.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
