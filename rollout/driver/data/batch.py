"""Sample groups as arrays for a trainer: padded, packed, or a plain dictionary of lists.

Always true: no sample is truncated; groups and their samples keep their order.

Arrays of ``padded`` (N samples, T tokens of the longest) and of ``packed`` (all samples end to
end, S tokens in total).  All are numpy arrays; ``rollout.driver.data.batch_torch.to_torch`` makes
tensors of them without a copy:

    key                  padded         packed   dtype
    token_ids            [N, T]         [S]      int64    prompt, then output; the pad id after it
    attention_mask       [N, T]         -        int64    1 for a token, 0 for padding
    position_ids         -              [S]      int64    index of a token in its sample
    cu_seqlens           -              [N + 1]  int32    sample i is cu_seqlens[i:i + 2]
    loss_mask            [N, T]         [S]      float32  1 for a token of the policy
    behaviour_logprobs   [N, T]         [S]      float32  natural log, under the policy that
                                                          generated the token; 0 elsewhere
    weight_versions      [N, T]         [S]      int64    of that policy; -1 elsewhere or if unknown
    prompt_lengths       [N]            [N]      int64
    response_lengths     [N]            [N]      int64
    rewards              [N]            [N]      float32  NaN if a sample has none
    group_index          [N]            [N]      int64    index of the sample's group in the batch
    logprob_kinds        [N]            [N]      int64    of the sample's log-probs: 0 full, 1 raw,
                                                          2 cut, 3 penalised; -1 if unknown
    routed_experts       [N, T, E]      [S, E]   int32    of each token that was computed; -1 for
                                                          the last one, padding and samples
                                                          without; no key if no sample has any
    sampling_mask_ids    [M]            [M]      int32    what the tokens were drawn from, token
                                                          by token; no key if no sample has any
    sampling_mask_ends   [N, T]         [S]      int64    where those of each token end in that:
                                                          none for the whole vocabulary

A trainer whose log-probs are log-softmax of logits / temperature has ``logprob_kinds.max() <= 0``.

E is layers x experts per token, layer by layer, as the engines report them; ``array.reshape(*array.
shape[:-1], num_layers, -1)`` separates both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.core.arguments import Positive, Whole, checked
from rollout.core.samples import Sample, SampleGroup, SampleStatus, all_samples, version_number

Array = NDArray[Any]


@checked
def padded(
    groups: Sequence[SampleGroup], *, pad_id: Whole = 0, pad_to_multiple: Positive = 1
) -> dict[str, Array]:
    """Samples side by side, padded on the right.

    Args:
        groups: a list, as the driver returns it.
        pad_id: token id for padding.
        pad_to_multiple: T is rounded up to a multiple of this.

    Raises:
        TypeError, ValueError: an argument is wrong.
        ValueError: there are no samples, or routed experts do not fit the tokens of their sample.
    """
    samples = _checked_samples(groups)
    lengths = [len(sample.prompt_ids) + len(sample.output_ids) for sample in samples]
    width = -(-max(lengths) // pad_to_multiple) * pad_to_multiple
    shape = (len(samples), width)
    batch: dict[str, Array] = {
        "token_ids": np.full(shape, pad_id, np.int64),
        "attention_mask": np.zeros(shape, np.int64),
        **_token_arrays(shape, samples),
    }
    for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        batch["attention_mask"][row, :length] = 1
        _fill(batch, (row, 0), sample)
    starts = range(0, len(samples) * width, width)
    return batch | _sample_arrays(groups, samples) | _masks(shape, starts, samples)


def packed(groups: Sequence[SampleGroup]) -> dict[str, Array]:
    """Samples end to end, without padding.

    Args:
        groups: a list, as the driver returns it.

    Raises:
        ValueError: there are no samples, or routed experts do not fit the tokens of their sample.
    """
    samples = _checked_samples(groups)
    lengths = [len(sample.prompt_ids) + len(sample.output_ids) for sample in samples]
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total = int(ends[-1])
    batch: dict[str, Array] = {
        "token_ids": np.zeros(total, np.int64),
        "position_ids": np.concatenate([np.arange(length) for length in lengths]).astype(np.int64),
        "cu_seqlens": ends,
        **_token_arrays((total,), samples),
    }
    for start, sample in zip(ends[:-1].tolist(), samples, strict=True):
        _fill(batch, (start,), sample)
    masks = _masks((total,), ends[:-1].tolist(), samples)
    return batch | _sample_arrays(groups, samples) | masks


def train_data(groups: Sequence[SampleGroup]) -> dict[str, list[Any]]:
    """Plain lists, one entry per sample, under the names that slime's trainers read.

    ``tokens`` (list of int), ``response_lengths`` (int), ``rewards`` (float or None),
    ``truncated`` (0 or 1), ``sample_indices`` (int, from 0), ``group_indices`` (int),
    ``loss_masks`` (list of int over the response), ``rollout_log_probs`` (list of float over the
    response), ``weight_versions`` (list of [version, start, end] over the response), ``metadata``,
    ``logprob_kinds`` (the name of a kind, or None).  Routed experts are not among them.

    Args:
        groups: a list, as the driver returns it.
    """
    samples = list(all_samples(groups))
    return {
        "tokens": [sample.prompt_ids + sample.output_ids for sample in samples],
        "response_lengths": [len(sample.output_ids) for sample in samples],
        "rewards": [sample.reward for sample in samples],
        "truncated": [int(sample.status is SampleStatus.TRUNCATED) for sample in samples],
        "sample_indices": list(range(len(samples))),
        "group_indices": [index for index, group in enumerate(groups) for _ in group.samples],
        "loss_masks": [list(sample.mask) for sample in samples],
        "rollout_log_probs": [list(sample.output_logprobs) for sample in samples],
        "weight_versions": [
            [[span.version, span.start, span.end] for span in sample.weight_versions]
            for sample in samples
        ],
        "metadata": [sample.metadata for sample in samples],
        "logprob_kinds": [s.logprob_kind and s.logprob_kind.value for s in samples],
    }


def _checked_samples(groups: Sequence[SampleGroup]) -> list[Sample]:
    samples = list(all_samples(groups))
    if not samples:
        raise ValueError("no samples to make a batch of")
    for sample in samples:
        sample.check()
    return samples


def _token_arrays(shape: tuple[int, ...], samples: Sequence[Sample]) -> dict[str, Array]:
    arrays: dict[str, Array] = {
        "loss_mask": np.zeros(shape, np.float32),
        "behaviour_logprobs": np.zeros(shape, np.float32),
        "weight_versions": np.full(shape, -1, np.int64),
    }
    if width := _experts_per_token(samples):
        arrays["routed_experts"] = np.full((*shape, width), -1, np.int32)
    return arrays


def _experts_per_token(samples: Sequence[Sample]) -> int:
    """Experts of one token in all layers together; 0 if no sample has routed experts."""
    found: dict[float, int] = {}
    for index, sample in enumerate(samples):
        if sample.routed_experts:
            found.setdefault(len(sample.routed_experts) / 4 / _num_computed(sample), index)
    widths = list(found)
    if len(widths) > 1 or any(not width.is_integer() for width in widths):
        number, index = found.popitem()
        sample = samples[index]
        raise ValueError(
            f"sample {index} has {len(sample.routed_experts or b'')} bytes of routed experts for "
            f"{_num_computed(sample)} computed tokens: {number:g} experts per token"
            + (f", not {widths[0]:g} as sample {found[widths[0]]}" if found else "")
        )
    return int(widths[0]) if widths else 0


def _num_computed(sample: Sample) -> int:
    """Tokens before the last one of the policy, which was sampled and not computed."""
    ends = [span.end for span in sample.weight_versions[-1:]] or [
        index + 1 for index, flag in enumerate(sample.mask) if flag
    ]
    num = len(sample.prompt_ids) + max(ends, default=len(sample.output_ids)) - 1
    return max(1, num)


def _fill(batch: dict[str, Array], at: tuple[int, ...], sample: Sample) -> None:
    *row, start = at

    def part(key: str, begin: int, length: int) -> Array:
        found: Array = batch[key][tuple(row)]
        return found[begin : begin + length]

    output, length = start + len(sample.prompt_ids), len(sample.output_ids)
    part("token_ids", start, len(sample.prompt_ids))[:] = sample.prompt_ids
    part("token_ids", output, length)[:] = sample.output_ids
    part("loss_mask", output, length)[:] = sample.mask
    part("behaviour_logprobs", output, length)[:] = sample.output_logprobs
    for span in sample.weight_versions:
        number = version_number(span.version)
        if number is not None:
            part("weight_versions", output + span.start, span.end - span.start)[:] = number
    if sample.routed_experts:
        experts = np.frombuffer(sample.routed_experts, np.int32).reshape(_num_computed(sample), -1)
        part("routed_experts", start, len(experts))[:] = experts


def _masks(
    shape: tuple[int, ...], starts: Sequence[int], samples: Sequence[Sample]
) -> dict[str, Array]:
    """Sampling masks as one list of ids; none if no sample has any.

    Args:
        starts: of the samples in the tokens of the batch.
    """
    if all(sample.sampling_mask is None for sample in samples):
        return {}
    lengths, ids = np.zeros(int(np.prod(shape)), np.int64), []
    for start, sample in zip(starts, samples, strict=True):
        begin = start + len(sample.prompt_ids)
        for place, mask in enumerate(sample.sampling_mask or (), begin):
            lengths[place] = len(mask or ())
            ids.append(np.asarray(mask or (), np.int32))
    joined = np.concatenate(ids) if ids else np.zeros(0, np.int32)
    return {"sampling_mask_ids": joined, "sampling_mask_ends": lengths.cumsum().reshape(shape)}


def _sample_arrays(groups: Sequence[SampleGroup], samples: list[Sample]) -> dict[str, Array]:
    rewards = [float("nan") if s.reward is None else s.reward for s in samples]
    group_index = [index for index, group in enumerate(groups) for _ in group.samples]
    return {
        "prompt_lengths": np.array([len(s.prompt_ids) for s in samples], np.int64),
        "response_lengths": np.array([len(s.output_ids) for s in samples], np.int64),
        "rewards": np.array(rewards, np.float32),
        "group_index": np.array(group_index, np.int64),
        "logprob_kinds": np.array(
            [-1 if s.logprob_kind is None else s.logprob_kind.code for s in samples], np.int64
        ),
    }
