"""A session that begins again after it was cut off."""

from __future__ import annotations

from typing import Any

import pytest

from engines.protocol import FinishReason, GenerateReply, SamplingParams, VersionSpan
from rollout.core.errors import GenerationAborted
from rollout.core.samples import Sample, SampleStatus
from rollout.driver.client.partial import extend
from rollout.driver.client.session import Session

SAMPLING = SamplingParams(max_new_tokens=8)


class Engine:
    """It numbers its tokens over all turns, and cuts the turn off at one of them."""

    def __init__(self, first: int = 100, cut_at: int = 10_000) -> None:
        self.next, self.cut_at = first, cut_at
        self.asked: list[int] = []

    async def complete(self, sample: Sample, turn: SamplingParams, *, base: int, **_: Any) -> None:
        num = turn.max_new_tokens - (len(sample.output_ids) - base)
        ids = range(self.next, min(self.next + num, self.cut_at))
        self.next = ids.stop
        self.asked.append(len(ids))
        reason = FinishReason("length" if len(ids) == num else "abort")
        extend(
            sample,
            GenerateReply(
                rid="r",
                text="".join(f"<{one}>" for one in ids),
                output_ids=tuple(ids),
                output_logprobs=(-1.0,) * len(ids),
                finish_reason=reason,
                weight_versions=(VersionSpan("1", 0, len(ids)),) if ids else (),
                engine_id=f"engine-{self.next}",
            ),
        )


def pending() -> Sample:
    return Sample([1], status=SampleStatus.PENDING)


async def talk(session: Session, observed: tuple[int, ...] = (7, 8), **more: Any) -> Sample:
    turn = SamplingParams(max_new_tokens=4, **more)
    await session.generate(turn)
    session.observe(observed, " tool ")
    await session.generate(turn)
    return session.sample


async def cut_session(cut_at: int, **more: Any) -> Session:
    session = Session(pending(), SAMPLING, Engine(cut_at=cut_at).complete)
    with pytest.raises(GenerationAborted):
        await talk(session, **more)
    return session


@pytest.mark.parametrize(("cut_at", "asked"), [(102, [2, 4]), (104, [4]), (106, [2])])
async def test_the_turns_so_far_are_not_generated_again(cut_at: int, asked: list[int]) -> None:
    earlier, engine = await cut_session(cut_at), Engine(first=cut_at)
    again = Session(pending(), SAMPLING, engine.complete, earlier.sample, earlier.turns)
    sample = await talk(again)
    whole = await talk(Session(pending(), SAMPLING, Engine().complete))
    sample.check()
    assert engine.asked == asked
    assert (sample.output_ids, sample.text) == (whole.output_ids, whole.text)
    assert (sample.mask, sample.weight_versions) == (whole.mask, whole.weight_versions)
    assert [turn.num_tokens for turn in again.turns] == [4, 10]
    assert sample.finish_reason == whole.finish_reason


async def test_behind_another_observation_the_turn_is_generated() -> None:
    earlier, engine = await cut_session(106), Engine(first=200)
    again = Session(pending(), SAMPLING, engine.complete, earlier.sample, earlier.turns)
    sample = await talk(again, observed=(7, 9))
    assert engine.asked == [4]
    assert sample.output_ids == [100, 101, 102, 103, 7, 9, 200, 201, 202, 203]


async def test_a_turn_with_a_grammar_begins_anew() -> None:
    earlier, engine = await cut_session(106, regex="[0-9]*"), Engine(first=200)
    again = Session(pending(), SAMPLING, engine.complete, earlier.sample, earlier.turns)
    sample = await talk(again, regex="[0-9]*")
    assert engine.asked == [4]
    assert sample.output_ids[-4:] == [200, 201, 202, 203]


async def test_what_an_environment_says_has_no_sampling_mask() -> None:
    async def complete(sample: Sample, *args: Any, **more: Any) -> None:
        extend(
            sample,
            GenerateReply(
                rid="r",
                text="ab",
                output_ids=(5, 6),
                output_logprobs=(-1.0, -1.0),
                finish_reason=FinishReason("stop"),
                sampling_mask=((5, 7), None),
            ),
        )

    session = Session(pending(), SAMPLING, complete)
    session.observe([8])
    await session.generate()
    session.observe([9, 9])
    await session.generate()
    assert session.sample.sampling_mask == [None, [5, 7], None, None, None, [5, 7], None]
    session.sample.check()
