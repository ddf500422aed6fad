"""Sampling masks of real SGLang: those of a forward pass, also behind a push."""

from __future__ import annotations

from pathlib import Path

import pytest

import rollout
from rollout.core.errors import RolloutError
from tests.support.load import PROMPTS
from tests.support.mask_truth import check_masks
from tests.support.real_policy import RealPolicy

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]
DRAWN = rollout.SamplingParams(
    max_new_tokens=40, temperature=0.8, top_k=9, top_p=0.7, ignore_eos=True
)
LONG = rollout.SamplingParams(
    max_new_tokens=400, temperature=0.8, top_k=9, top_p=0.7, ignore_eos=True
)


def path_of(policy: RealPolicy, version: str) -> Path:
    return policy.weights_of(int(version))


def test_masks_are_those_of_a_forward_pass_also_where_a_push_cuts_the_reply(
    policy: RealPolicy,
) -> None:
    handle, prompt = policy.handle, list(PROMPTS[0])
    reply = handle.generate(prompt, DRAWN, sampling_mask=True).result(120)
    check_masks(prompt, reply, DRAWN, lambda version: path_of(policy, version))

    stream = iter(handle.stream(prompt, LONG, sampling_mask=True))
    assert any(len(part.output_ids) > 4 for part in stream)
    handle.offload().result(120)
    handle.push(policy.next_tensors()).result(120)
    *_, reply = stream
    assert len(reply.output_ids) == LONG.max_new_tokens
    assert len(reply.weight_versions) > 1
    check_masks(prompt, reply, LONG, lambda version: path_of(policy, version))


def test_a_greedy_token_is_its_own_mask_and_a_request_without_top_k_is_refused(
    policy: RealPolicy,
) -> None:
    greedy = rollout.SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
    prompt = list(PROMPTS[1])
    reply = policy.handle.generate(prompt, greedy, sampling_mask=True).result(120)
    assert reply.sampling_mask == tuple((token,) for token in reply.output_ids)
    open_ended = rollout.SamplingParams(max_new_tokens=8, top_p=0.9)
    with pytest.raises(RolloutError, match="return_sampling_mask requires top_k"):
        policy.handle.generate(prompt, open_ended, sampling_mask=True).result(120)
