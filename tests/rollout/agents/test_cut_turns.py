"""A worker that is killed at any moment of a turn: what was answered is in its files.

A kill leaves the folder as it is then: so a copy of it, which another worker continues, stands for
one.  Always true: an answered turn is in the file; one in the file that was not answered is at
most one more branch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from rollout.agents import chats
from rollout.agents.router_link import RouterLink
from rollout.agents.turns.files import SessionFiles, digest_of
from rollout.agents.turns.store import SessionStore
from rollout.config import AgentsConfig
from rollout.core.samples import Sample
from rollout.driver.client.branch_samples import branch_samples
from tests.rollout.agents.conftest import Agent, MakeAgentOf
from tests.support.agent_workers import worker_of_router
from tests.support.chat_models import TOOLS, write_chat_model

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

NUM_TURNS = 3
FILE = f"{digest_of('s').hex()}.jsonl"
# Before the turn is in the file; and with it there.
NOT_WRITTEN = ("before the request", "after the reply", "within the line")
WRITTEN = ("after the line", "before the last byte", "after the answer")


class Cuts:
    """Copies of a worker's folder, as they were at the moments of its turns.

    Args:
        folder: the worker's.
        copies: where the copies are made.
    """

    def __init__(self, folder: Path, copies: Path) -> None:
        self._folder = folder
        self._copies = copies
        self.turn = 0

    def at(self, moment: str) -> Path:
        """The copy of the present turn."""
        return self._copies / f"{self.turn} {moment}"

    def cut(self, moment: str) -> None:
        shutil.copytree(self._folder, self.at(moment))

    def before(self, patch: pytest.MonkeyPatch, owner: Any, name: str, moment: str) -> None:
        """Cut each time that this is called."""
        real: Callable[..., Any] = getattr(owner, name)

        def cut_first(*args: Any, **options: Any) -> Any:
            self.cut(moment)
            return real(*args, **options)

        patch.setattr(owner, name, cut_first)

    def around_lines(self, patch: pytest.MonkeyPatch) -> None:
        """Cut behind each line, and within it."""
        real = SessionFiles.append

        def append(*args: Any) -> int:
            (at,) = args[-1:]
            end = real(*args)
            self.cut("after the line")
            self.cut("within the line")
            with (self.at("within the line") / FILE).open("r+b") as torn:
                torn.truncate((at + end) // 2)
            return end

        patch.setattr(SessionFiles, "append", append)


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def ask(
    client: openai.AsyncOpenAI, history: list[Any], number: int, *, stream: bool
) -> list[Any]:
    """The history with this turn's question and its answer."""
    asked = [*history, {"role": "user", "content": f"question {number}"}]
    options: Any = {"model": "policy", "messages": asked, "tools": TOOLS, "stream": stream}
    reply: Any = await client.chat.completions.create(**options)
    if not stream:
        return [*asked, {"role": "assistant", "content": reply.choices[0].message.content}]
    text = "".join([part.choices[0].delta.content or "" async for part in reply])
    return [*asked, {"role": "assistant", "content": text}]


@asynccontextmanager
async def continued(agent: Agent, folder: Path) -> Any:
    """A client of another worker, which continues from this folder, and the turns it has."""
    config = AgentsConfig(tokenizer_path=str(agent.folder))
    async with (
        worker_of_router(agent.bench.url, folder, config) as url,
        openai.AsyncOpenAI(
            base_url=f"{url}/sessions/s/v1", api_key="none", max_retries=0
        ) as client,
    ):

        async def turns() -> list[dict[str, Any]]:
            async with aiohttp.request("GET", f"{url}/sessions/s") as reply:
                return [] if reply.status == 404 else (await reply.json())["turns"]

        yield client, turns


async def test_a_worker_killed_at_any_moment_of_any_turn_loses_nothing_that_was_answered(
    make_agent_of: MakeAgentOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
) -> None:
    agent = await make_agent_of(
        write_chat_model(tmp_path / "model"), lambda prompt: f"answer of {len(prompt)}"
    )
    cuts = Cuts(Path(agent.worker.settings.folder), tmp_path / "cuts")
    histories: list[list[Any]] = [[]]
    with monkeypatch.context() as patch:
        cuts.before(patch, RouterLink, "generate", "before the request")
        cuts.before(patch, SessionStore, "keep", "after the reply")
        cuts.around_lines(patch)
        cuts.before(patch, chats, "_end_of_response", "before the last byte")
        for number in range(NUM_TURNS):
            cuts.turn = number
            histories.append(await ask(agent.client, histories[-1], number, stream=stream))
            cuts.cut("after the answer")
    reference, (sample,) = await agent.turns(), await agent.samples()
    assert [turn["turn"] for turn in reference] == list(range(NUM_TURNS))
    for number in range(NUM_TURNS):
        cuts.turn = number
        for moment in (*NOT_WRITTEN, *WRITTEN):
            num_written = number + (moment in WRITTEN)
            async with continued(agent, cuts.at(moment)) as (client, turns):
                assert await turns() == reference[:num_written], moment
                first = number + (moment == "after the answer")  # of those that are sent again
                for again in range(first, NUM_TURNS):
                    history = await ask(client, histories[again], again, stream=stream)
                    assert history == histories[again + 1]
                after = await turns()
            num_more = num_written - first
            assert num_more == (moment in WRITTEN and moment != "after the answer")
            check(reference, sample, after, num_more)


def check(
    reference: list[dict[str, Any]], sample: Sample, turns: list[dict[str, Any]], num_more: int
) -> None:
    """The conversation's turns are those without a kill, and each token counts once."""
    assert len(turns) == NUM_TURNS + num_more
    path = path_of(turns)
    assert [without_place(turn) for turn in path] == [without_place(turn) for turn in reference]
    samples = branch_samples("s", turns)
    assert len(samples) == 1 + num_more
    assert samples[-1].prompt_ids + samples[-1].output_ids == sample.prompt_ids + sample.output_ids
    num_generated = sum(len(turn["output_ids"]) for turn in turns)
    assert sum(sum(one.mask) for one in samples) == num_generated


def path_of(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """From the first turn to the last one."""
    path = turns[-1:]
    while (parent := path[0]["parent"]) is not None:
        path.insert(0, turns[parent])
    return path


def without_place(turn: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in turn.items() if name not in ("turn", "parent")}
