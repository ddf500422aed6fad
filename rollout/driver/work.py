"""One prompt on its way to a sample group, and how that is written down for a restart.

Always true: a work's serial is its own, in the order in which prompts left the source; its samples
keep their places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from engines.protocol import FinishReason, VersionSpan
from rollout.driver.prompts import Prompt
from rollout.samples import Sample, SampleGroup, SampleStatus


@dataclass(slots=True, eq=False)
class Work:
    """A group that is not delivered yet.

    Attributes:
        judged: places of the samples that have been through the reward.
        num_redone: how often it was too old when it was whole, and done anew.
        num_restarted: how many of its samples were too old when they were cut off.
        is_accepted: it went through every filter.
        num_parked: how often it was put aside unfinished.
    """

    serial: int
    prompt: Prompt
    samples: list[Sample]
    judged: set[int] = field(default_factory=set)
    num_redone: int = 0
    num_restarted: int = 0
    is_accepted: bool = False
    num_parked: int = 0

    @classmethod
    def begin(cls, serial: int, prompt: Prompt, group_size: int) -> Work:
        """Nothing of it is generated yet."""
        samples = [
            Sample(list(prompt.ids), status=SampleStatus.PENDING, metadata=dict(prompt.metadata))
            for _ in range(group_size)
        ]
        return cls(serial, prompt, samples)

    @property
    def num_unfinished(self) -> int:
        return sum(sample.is_unfinished for sample in self.samples)

    def group(self) -> SampleGroup:
        """What the trainer gets."""
        return SampleGroup(self.serial, self.samples, dict(self.prompt.metadata))


def work_state(work: Work) -> dict[str, Any]:
    """The work as JSON has it."""
    return {
        "serial": work.serial,
        "prompt": {"ids": list(work.prompt.ids), "metadata": work.prompt.metadata},
        "samples": [asdict(sample) for sample in work.samples],
        "judged": sorted(work.judged),
        "num_redone": work.num_redone,
        "num_restarted": work.num_restarted,
        "is_accepted": work.is_accepted,
        "num_parked": work.num_parked,
    }


def work_of(state: Mapping[str, Any]) -> Work:
    """The work that ``work_state`` wrote down."""
    return Work(
        serial=state["serial"],
        prompt=Prompt(tuple(state["prompt"]["ids"]), state["prompt"]["metadata"]),
        samples=[_sample(sample) for sample in state["samples"]],
        judged=set(state["judged"]),
        num_redone=state["num_redone"],
        num_restarted=state["num_restarted"],
        is_accepted=state["is_accepted"],
        num_parked=state["num_parked"],
    )


def _sample(state: Mapping[str, Any]) -> Sample:
    reason = state["finish_reason"]
    return Sample(
        **{
            **state,
            "prompt_ids": list(state["prompt_ids"]),
            "output_ids": list(state["output_ids"]),
            "output_logprobs": list(state["output_logprobs"]),
            "loss_mask": list(state["loss_mask"]),
            "metadata": dict(state["metadata"]),
            "weight_versions": tuple(VersionSpan(**span) for span in state["weight_versions"]),
            "finish_reason": None if reason is None else FinishReason(**reason),
            "status": SampleStatus(state["status"]),
        }
    )
