"""The requests for samples of one or more prompts.

Always true: the ids of all requests have 32 characters.  They are made of the caller's request id,
so that any process can abort them, and those of one call share a prefix of their own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2s
from typing import Annotated, Any, Unpack, get_type_hints

from pydantic import Field, TypeAdapter, with_config
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from engines.protocol import SamplingParams
from engines.protocol.logprob_kind import LogprobKind
from rollout.core.arguments import STRICT, Count, Seconds, TokenIds, checked_as, wrong, wrong_type
from rollout.driver.client.generation_client import GenerationRequest
from rollout.driver.client.sampling_check import check_sampling
from rollout.rules.contract import MOST_VERSION, Contract, contract_of

_PREFIX_BYTES = 12
_TIMEOUT_S = 600.0
_FLAGS: tuple[tuple[str, str, Any], ...] = (
    ("prompt_logprobs", "logprob_start_len", 0),
    ("routed_experts", "return_routed_experts", True),
    ("sampling_mask", "return_sampling_mask", True),
)
Version = Annotated[Count, Field(lt=MOST_VERSION)]


@with_config(STRICT)
class VersionOptions(TypedDict, total=False):
    """Which weight versions the tokens of a reply may have; by default all.

    A version that is not served yet is waited for, within ``router.hold_timeout_s``.

    Attributes:
        weight_version: the only one.
        min_weight_version: the oldest one.
        max_version_lag: how many versions a token may be behind the one that is served when its
            reply ends.
    """

    weight_version: Version | None
    min_weight_version: Version | None
    max_version_lag: Version | None


@with_config(STRICT)
class SampleOptions(VersionOptions, total=False):
    """What a request for samples may have besides prompt, sampling and id.

    Attributes:
        image_data: an image of the prompt, or a list of them: URL, path or base64, as the engine
            takes it.  For several prompts, a list with one such entry, or None, for each.
        prompt_logprobs: the reply has ``input_logprobs``.
        top_logprobs: the reply has the so many most probable tokens at each position, at the
            prompt's too with ``prompt_logprobs``.
        routed_experts: the reply has ``routed_experts``.
        sampling_mask: the reply has ``sampling_mask``; engines that have none refuse the request.
        lora_path: name of a LoRA adapter; None: the base; by default what was pushed last.
        affinity: requests with the same one prefer the same engine.
        timeout_s: seconds for each reply, including time held at the gate; by default 600.
        weight_version, min_weight_version, max_version_lag: see ``VersionOptions``.
        logprob_kind: the distribution that the log-probs are of: ``full`` for a trainer's, which is
            log-softmax of logits / temperature.  A request that no engine has it for is refused.
    """

    image_data: Any
    prompt_logprobs: bool
    top_logprobs: Count
    routed_experts: bool
    sampling_mask: bool
    lora_path: str | None
    affinity: str
    timeout_s: Seconds
    logprob_kind: Annotated[LogprobKind, Field(strict=False)] | None


_OPTIONS = TypeAdapter(SampleOptions)
_VERSIONS = TypeAdapter(VersionOptions)
_IDS: TypeAdapter[tuple[int, ...]] = TypeAdapter(TokenIds, config=STRICT)


def rid_prefix(request_id: str) -> str:
    """The beginning of the ids of a call's requests, and of no other's."""
    if not request_id:
        raise wrong("request_id", request_id, "a text that is not empty")
    return blake2s(request_id.encode(), digest_size=_PREFIX_BYTES).hexdigest() + "-"


def is_batch(token_ids: Any) -> bool:
    """Whether these are several prompts.

    Raises:
        TypeError: they are neither one prompt nor several.
    """
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
        raise wrong_type("token_ids", token_ids, "a list of token ids, or a list of such lists")
    return bool(token_ids) and not isinstance(token_ids[0], int)


def make_requests(
    token_ids: Any,
    sampling: SamplingParams | None,
    request_id: str,
    **options: Unpack[SampleOptions],
) -> list[GenerationRequest]:
    """One request for each completion: those of the first prompt, then those of the second.

    With a seed, the completions of one prompt have consecutive ones.

    Raises:
        TypeError, ValueError: an argument is wrong; it is named with its index in the batch.
    """
    _check_names(options, SampleOptions)
    sampling = sampling or SamplingParams()
    check_sampling(sampling, least_tokens=0)
    options = checked_as(_OPTIONS, options)
    contract = _contract_of(options)
    prompts = _prompts(token_ids, sampling)
    prefix = rid_prefix(request_id or os.urandom(_PREFIX_BYTES).hex())
    fields = _with_images(_fields(options), options, len(prompts), is_batch(token_ids))
    pairs = [(index, copy) for index in range(len(prompts)) for copy in range(sampling.n)]
    return [
        GenerationRequest(
            f"{prefix}{number:07x}",
            prompts[index],
            _copy_of(sampling, copy),
            options.get("affinity", ""),
            fields[index],
            fails_over=True,
            timeout_s=options.get("timeout_s", _TIMEOUT_S),
            contract=contract,
        )
        for number, (index, copy) in enumerate(pairs)
    ]


def version_contract(**options: Unpack[VersionOptions]) -> Contract:
    """What the turns of a session fulfil.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """
    _check_names(options, VersionOptions)
    known = checked_as(_VERSIONS, options)
    return _contract_of(known)


def _check_names(options: Mapping[str, Any], kind: type[VersionOptions]) -> None:
    known = get_type_hints(kind)
    if unknown := sorted(options.keys() - known):
        raise TypeError(f"{unknown[0]} is no option of a request; known: {', '.join(known)}")


def _contract_of(options: Mapping[str, Any]) -> Contract:
    try:
        return contract_of(options)
    except ValueError as error:  # each is right, but not beside the others
        raise ValueError(str(error)) from None


def _prompts(token_ids: Any, sampling: SamplingParams) -> list[list[int]]:
    if not is_batch(token_ids):
        if sampling.n != 1:
            raise wrong("n", sampling.n, "1 for one prompt; [token_ids] gives a list of replies")
        return [_checked_ids("token_ids", token_ids)]
    return [_checked_ids(f"token_ids[{index}]", ids) for index, ids in enumerate(token_ids)]


def _checked_ids(name: str, ids: Any) -> list[int]:
    found = checked_as(_IDS, ids, name)
    if not found:
        raise ValueError(f"{name} has no tokens")
    return list(found)


def _copy_of(sampling: SamplingParams, copy: int) -> SamplingParams:
    if sampling.n == 1:
        return sampling
    seed = sampling.sampling_seed
    return replace(sampling, n=1, sampling_seed=None if seed is None else seed + copy)


def _fields(options: SampleOptions) -> dict[str, Any]:
    """What the body of every prompt has besides ids and sampling, with SGLang's names."""
    num_top = options.get("top_logprobs", 0)
    fields: dict[str, Any] = {"top_logprobs_num": num_top} if num_top else {}
    fields |= {field: value for name, field, value in _FLAGS if options.get(name)}
    return fields | weights_field(options.get("lora_path", ""))


def weights_field(lora_path: str | None) -> dict[str, Any]:
    """The field of a body that names its weights.

    Args:
        lora_path: name of a LoRA adapter; None: the base; empty: what was pushed last.
    """
    return {} if lora_path == "" else {"lora_path": lora_path}


def _with_images(
    fields: dict[str, Any], options: SampleOptions, num_prompts: int, is_batched: bool
) -> list[dict[str, Any]]:
    """The fields of each prompt, with its images."""
    image_data = options.get("image_data")
    if image_data is None:
        return [fields] * num_prompts
    images = image_data if is_batched else [image_data]
    if not isinstance(images, list | tuple) or len(images) != num_prompts:
        raise wrong("image_data", image_data, f"a list with the images of each of {num_prompts}")
    return [fields if image is None else fields | {"image_data": image} for image in images]
