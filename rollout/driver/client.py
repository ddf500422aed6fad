"""One ``/generate`` request through the router, as a ``Sample``.

aiohttp, not httpx: thousands of small requests a second go through here, and httpx costs about
eight times the CPU of aiohttp for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aiohttp

from engines.protocol import FinishReason, SamplingParams, VersionSpan
from rollout.types import Sample, SampleStatus


class GenerateClient:
    """Sends prompts to ``url`` and returns samples.  One per event loop; close it.

    Args:
        url: base URL of a router or of one engine.
        max_in_flight: connections at the same time; more requests wait here.
        timeout_s: for one whole completion, time parked at the gate included.
    """

    def __init__(self, url: str, *, max_in_flight: int, timeout_s: float) -> None:
        self._url = url.rstrip("/") + "/generate"
        self._timeout_s = timeout_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_in_flight),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        )

    async def close(self) -> None:
        await self._session.close()

    async def sample(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, metadata: dict[str, Any]
    ) -> Sample:
        """One completion; whatever goes wrong is a sample with status ``failed`` and the reason.

        An engine's refusal (4xx) is final.  Nothing is repeated here: the router already tried
        another engine where that was safe.
        """
        body = {
            "input_ids": list(prompt_ids),
            "sampling_params": sampling.to_wire(),
            "return_logprob": True,
        }
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    text = (await response.text())[:500]
                    return _failed(prompt_ids, metadata, f"HTTP {response.status}: {text}")
                answer = await response.json()
            return _sample(prompt_ids, answer, metadata)
        except TimeoutError:
            return _failed(prompt_ids, metadata, f"no answer within {self._timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return _failed(prompt_ids, metadata, f"{type(error).__name__}: {error}")
        except (KeyError, TypeError, ValueError) as error:
            return _failed(prompt_ids, metadata, f"unusable answer: {error!r}")


def _failed(prompt_ids: Sequence[int], metadata: dict[str, Any], error: str) -> Sample:
    return Sample(list(prompt_ids), status=SampleStatus.FAILED, error=error, metadata=metadata)


_STATUS = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


def _sample(prompt_ids: Sequence[int], answer: dict[str, Any], metadata: dict[str, Any]) -> Sample:
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    return Sample(
        prompt_ids=list(prompt_ids),
        output_ids=list(answer["output_ids"]),
        output_logprobs=[entry[0] for entry in meta.get("output_token_logprobs") or ()],
        text=answer["text"],
        weight_versions=tuple(
            VersionSpan(str(span["version"]), span["start"], span["end"])
            for span in meta.get("weight_versions") or ()
        ),
        finish_reason=FinishReason(
            reason["type"], reason.get("matched"), reason.get("message", "")
        ),
        status=_STATUS[reason["type"]],
        metadata=metadata,
    )
