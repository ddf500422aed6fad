"""Bytes of a push that change after the trainer has written them never reach real SGLang.

All engines load one file, so SGLang's checksums, which are of its own kind, would be equal.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import aiohttp
import pytest

import rollout
from rollout.weights.routes.buffers import FILE_NAME
from tests.support.generate_asking import AskingGenerate
from tests.support.real_policy import RealPolicy
from tests.support.referee import Referee

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


def flip_last_bytes() -> None:
    """Of the bucket of the last push that this process has made."""
    files = Path("/dev/shm").glob(f"rollout-push-{os.getpid()}-*/*/{FILE_NAME}")
    file = max(files, key=lambda path: path.stat().st_mtime_ns)
    with file.open("r+b") as opened:
        opened.seek(-64, os.SEEK_END)
        flipped = bytes(byte ^ 0x55 for byte in opened.read())
        opened.seek(-64, os.SEEK_END)
        opened.write(flipped)


async def test_flipped_bytes_of_a_buckets_file_are_refused_and_the_next_push_serves(
    policy: RealPolicy,
) -> None:
    version = policy.handle.weight_version
    with (  # noqa: PT012
        pytest.raises(rollout.WeightsUnavailable, match="is not what the trainer wrote"),
        policy.handle.offloaded() as window,
    ):
        window.push(policy.next_tensors())
        flip_last_bytes()
    status = policy.handle.status().result(30)
    assert (status.gate, status.weight_version) == ("closed", version)
    await policy.handle.push(policy.next_tensors())
    assert policy.is_whole()
    async with aiohttp.ClientSession(policy.handle.url) as session:
        asking = AskingGenerate(session)
        await asyncio.gather(*(asking.ask(number) for number in range(8)))
    assert not Referee(policy.weights_of).findings(asking.answers)
