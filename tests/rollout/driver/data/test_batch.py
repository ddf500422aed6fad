"""Groups as arrays: shapes, dtypes and positions are the documented ones."""

import itertools
from typing import Any

import numpy as np
import pytest

from engines.protocol import VersionSpan
from engines.protocol.logprob_kind import LogprobKind
from rollout.core.samples import Sample, SampleGroup, SampleStatus
from rollout.driver.data import batch as batches
from rollout.driver.data.batch import packed, padded, train_data


def groups() -> list[SampleGroup]:
    long = Sample(
        [1, 2],
        [3, 4, 5],
        [-0.5, 0.0, -1.5],
        weight_versions=(VersionSpan("6", 0, 1), VersionSpan("7", 2, 3)),
        reward=1.0,
        loss_mask=[1, 0, 1],
    )
    short = Sample([8], [9], [-2.0], status=SampleStatus.TRUNCATED)
    return [SampleGroup(0, [long]), SampleGroup(4, [short])]


def test_padded_puts_every_token_in_its_place() -> None:
    batch = padded(groups(), pad_id=99, pad_to_multiple=4)
    assert batch["token_ids"].tolist() == [[1, 2, 3, 4, 5, 99, 99, 99], [8, 9] + [99] * 6]
    assert batch["attention_mask"].sum(1).tolist() == [5, 2]
    assert batch["loss_mask"][:, :5].tolist() == [[0, 0, 1, 0, 1], [0, 1, 0, 0, 0]]
    assert batch["behaviour_logprobs"][0, :5].tolist() == [0, 0, -0.5, 0, -1.5]
    assert batch["weight_versions"][:, :5].tolist() == [[-1, -1, 6, -1, 7], [-1] * 5]


def test_packed_puts_samples_end_to_end() -> None:
    batch = packed(groups())
    assert batch["token_ids"].tolist() == [1, 2, 3, 4, 5, 8, 9]
    assert batch["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch["cu_seqlens"].tolist() == [0, 5, 7]
    assert batch["loss_mask"].tolist() == [0, 0, 1, 0, 1, 0, 1]
    assert batch["weight_versions"].tolist() == [-1, -1, 6, -1, 7, -1, -1]


def with_experts() -> list[SampleGroup]:
    """Two layers with one expert per token; a tool's last token was never computed."""
    made = groups()
    (long,), (short,) = made
    long.output_ids, long.output_logprobs = [3, 4, 5, 6], [-0.5, 0.0, -1.5, 0.0]
    long.loss_mask = [1, 0, 1, 0]
    long.routed_experts = np.array([[0, 1], [2, 3], [4, 5], [6, 7]], np.int32).tobytes()
    short.routed_experts = np.array([[8, 9]], np.int32).tobytes()
    return made


def test_experts_are_at_the_tokens_that_they_computed() -> None:
    none, computed = [-1, -1], [[0, 1], [2, 3], [4, 5], [6, 7]]
    array = padded(with_experts(), pad_to_multiple=4)["routed_experts"]
    assert array.dtype == np.int32
    assert array.tolist() == [
        [*computed, none, none, none, none],
        [[8, 9], *[none] * 7],
    ]
    assert packed(with_experts())["routed_experts"].tolist() == [
        *computed, none, none, [8, 9], none
    ]  # fmt: skip


def test_a_sample_without_experts_has_none_beside_others() -> None:
    mixed = with_experts()
    mixed[0].samples[0].routed_experts = None
    assert packed(mixed)["routed_experts"].tolist() == [*[[-1, -1]] * 6, [8, 9], [-1, -1]]
    assert "routed_experts" not in packed(groups())
    assert "routed_experts" not in padded(groups())


def test_the_loss_mask_does_not_change_what_was_computed() -> None:
    hidden = with_experts()
    long = hidden[0].samples[0]
    long.loss_mask = [0, 0, 0, 0]  # a filter that keeps this sample out of the loss
    assert packed(hidden)["routed_experts"][:6].tolist() == [
        [0, 1], [2, 3], [4, 5], [6, 7], [-1, -1], [-1, -1]
    ]  # fmt: skip


def test_experts_that_do_not_fit_their_tokens_name_the_sample() -> None:
    bad = with_experts()
    bad[1].samples[0].routed_experts = b"1234" * 3
    words = "sample 1 has 12 bytes of routed experts for 1 computed tokens: 3 experts per token, "
    with pytest.raises(ValueError, match=f"{words}not 2 as sample 0"):
        padded(bad)
    bad[0].samples[0].routed_experts = None
    bad[1].samples[0].routed_experts = b"12345"
    with pytest.raises(ValueError, match=r"1\.25 experts per token$"):
        packed(bad)


@pytest.mark.parametrize("make", [padded, packed])
def test_arrays_of_samples_have_length_reward_and_group(make) -> None:
    batch = make(groups())
    assert batch["prompt_lengths"].tolist() == [2, 1]
    assert batch["response_lengths"].tolist() == [3, 1]
    np.testing.assert_array_equal(batch["rewards"], [1.0, np.nan])
    assert batch["group_index"].tolist() == [0, 1]


@pytest.mark.parametrize("make", [padded, packed])
def test_a_trainer_checks_the_kinds_of_its_log_probs_in_one_line(make) -> None:
    made = groups()
    (long,), (short,) = made
    assert make(made)["logprob_kinds"].tolist() == [-1, -1]
    long.logprob_kind, short.logprob_kind = LogprobKind.FULL, LogprobKind.PENALISED
    kinds = make(made)["logprob_kinds"]
    assert kinds.tolist() == [0, 3]
    assert kinds.max() > 0  # not what a trainer computes
    assert train_data(made)["logprob_kinds"] == ["full", "penalised"]


def test_the_codes_of_kinds_are_the_documented_ones() -> None:
    assert [kind.code for kind in LogprobKind] == [0, 1, 2, 3]
    assert "0 full, 1 raw, 2 cut, 3 penalised" in " ".join((batches.__doc__ or "").split())


def test_dtypes_are_the_documented_ones() -> None:
    dtypes = {key: str(array.dtype) for key, array in (padded(groups()) | packed(groups())).items()}
    floats = {key for key, dtype in dtypes.items() if dtype == "float32"}
    assert floats == {"loss_mask", "behaviour_logprobs", "rewards"}
    assert {key for key, dtype in dtypes.items() if dtype == "int32"} == {"cu_seqlens"}
    assert set(dtypes.values()) == {"float32", "int32", "int64"}


def test_train_data_has_one_entry_per_sample_in_every_list() -> None:
    data = train_data(groups())
    assert {len(values) for values in data.values()} == {2}
    assert data["tokens"] == [[1, 2, 3, 4, 5], [8, 9]]
    assert data["rollout_log_probs"][0] == [-0.5, 0.0, -1.5]
    assert (data["truncated"], data["rewards"]) == ([0, 1], [1.0, None])


def test_an_empty_batch_is_rejected() -> None:
    with pytest.raises(ValueError, match="no sample"):
        padded([])
    with pytest.raises(ValueError, match="pad_to_multiple = 0"):
        padded(groups(), pad_to_multiple=0)


def test_a_sample_whose_lengths_disagree_is_rejected() -> None:
    bad = groups()
    bad[0].samples[0].output_ids.append(1)
    with pytest.raises(ValueError, match="4 output ids but 3 log-probs"):
        packed(bad)


@pytest.mark.embedded
def test_tensors_share_the_memory_of_the_arrays() -> None:
    from rollout.driver.data.batch_torch import to_torch

    batch = packed(groups())
    tensors = to_torch(batch)
    batch["token_ids"][0] = 42
    assert tensors["token_ids"][0].item() == 42
    assert tensors.keys() == batch.keys()


def with_masks() -> list[SampleGroup]:
    made = groups()
    made[0].samples[0].sampling_mask = [[3, 30], None, [5]]
    return made


@pytest.mark.parametrize("make", [lambda groups: padded(groups, pad_to_multiple=4), packed])
def test_each_token_has_the_ids_that_it_was_drawn_from(make: Any) -> None:
    batch = make(with_masks())
    ids, ends = batch["sampling_mask_ids"], batch["sampling_mask_ends"]
    assert (ids.dtype, ends.dtype) == (np.int32, np.int64)
    assert ends.shape == batch["token_ids"].shape
    starts = [0, *ends.flatten().tolist()]
    of_tokens = [ids[start:end].tolist() for start, end in itertools.pairwise(starts)]
    found = {place: mask for place, mask in enumerate(of_tokens) if mask}
    assert found == {2: [3, 30], 4: [5]}
    assert not {"sampling_mask_ids", "sampling_mask_ends"} & make(groups()).keys()


def test_no_masks_are_none_where_nothing_was_cut() -> None:
    made = groups()
    made[1].samples[0].sampling_mask = [None]
    batch = packed(made)
    assert batch["sampling_mask_ids"].size == 0
    assert batch["sampling_mask_ends"].tolist() == [0] * 7


def test_masks_of_other_tokens_are_refused() -> None:
    bad = with_masks()
    bad[0].samples[0].sampling_mask = [[3]]
    with pytest.raises(ValueError, match="3 output ids but 1 sampling masks"):
        packed(bad)
