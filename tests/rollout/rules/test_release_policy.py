"""Every released byte has a source, or the configuration is refused."""

from typing import Any

import pytest

from engines.protocol import MemoryTag
from rollout.config import GroupConfig, WeightUpdate
from rollout.core.errors import ConfigError
from rollout.rules.release_policy import (
    draft_note,
    elastic_backup_note,
    group_traits,
    least_freed_bytes,
    release_policy,
)


def group(backup: bool | None = None, *, needs_offload: bool = True) -> GroupConfig:
    return GroupConfig.model_validate(
        {"needs_offload": needs_offload, "engine": {"kind": "fake", "weights_cpu_backup": backup}}
    )


@pytest.mark.parametrize(
    ("update", "backup", "is_backed_up", "weights_from"),
    [
        ("full", None, False, "the push (all tensors)"),
        ("full", False, False, "the push (all tensors)"),
        ("full", True, True, "CPU backup, then the push"),
        ("partial", None, True, "CPU backup, then the push"),
        ("partial", True, True, "CPU backup, then the push"),
        ("lora", None, True, "CPU backup, then the push"),
        ("lora", True, True, "CPU backup, then the push"),
        ("frozen", None, True, "CPU backup"),
        ("frozen", True, True, "CPU backup"),
    ],
)
def test_the_policy_of_a_group_that_offloads(update, backup, is_backed_up, weights_from) -> None:
    policy = release_policy("path", group(backup), WeightUpdate(update))
    assert set(policy.tags) == set(MemoryTag)
    assert policy.weights_cpu_backup is is_backed_up
    assert policy.weights_from == weights_from


@pytest.mark.parametrize(
    ("update", "lost"),
    [
        ("partial", "the tensors that are not pushed"),
        ("lora", "the base weights under the adapter"),
        ("frozen", "all weights"),
    ],
)
def test_weights_without_a_source_are_refused_with_the_setting_that_mends_it(update, lost) -> None:
    with pytest.raises(ConfigError, match=rf"^path\.engine\.weights_cpu_backup = False: .*{lost}"):
        release_policy("path", group(False), WeightUpdate(update))


def test_tensors_that_a_full_push_leaves_out_survive_a_release_by_a_backup() -> None:
    policy = release_policy("path", group(), WeightUpdate.FULL, ["mtp.*"])
    assert (policy.weights_cpu_backup, policy.weights_from) == (True, "CPU backup, then the push")
    assert group_traits("path", group(), WeightUpdate.FULL, ["mtp.*"]).weights_survive
    with pytest.raises(ConfigError, match=r"the tensors of weights\.not_pushed \(mtp\.\*\) would"):
        release_policy("path", group(False), WeightUpdate.FULL, ["mtp.*"])


def with_draft(
    options: dict[str, Any], kind: str = "vllm", *, backup: bool | None = None
) -> GroupConfig:
    engine = {"kind": kind, "gpus": 1, "options": options, "weights_cpu_backup": backup}
    return GroupConfig.model_validate({"engine": engine})


@pytest.mark.parametrize(
    ("options", "draft"),
    [
        ({"speculative-config": {"model": "/draft", "num_speculative_tokens": 3}}, "/draft"),
        ({"speculative_config": '{"method": "draft_model", "model": "/draft"}'}, "/draft"),
        ({"--speculative-config": {"method": "eagle3", "model": "/draft"}}, "/draft"),
        ({"speculative-config": {"method": "mtp", "num_speculative_tokens": 1}}, "mtp"),
        ({"speculative-config": {"num-speculative-tokens": 1}}, "speculative-config"),
        ({"speculative-config.method": "eagle", "speculative-config.model": "/draft"}, "/draft"),
        ({"spec-method": "mtp", "spec-tokens": 1}, "mtp"),
        ({"spec-model": "/draft"}, "/draft"),
        ({"speculative-config": "{damaged"}, "speculative-config"),
        ({"speculative-config": {"method": "ngram", "prompt_lookup_max": 4}}, ""),
        ({"speculative-config": {"model": "ngram", "num_speculative_tokens": 3}}, ""),
        ({"speculative-config": '{"method": "suffix"}'}, ""),
        ({"speculative-config": {"method": "ngram_gpu"}}, ""),
        ({"spec-method": "ngram", "spec-tokens": 3}, ""),
        ({"speculative-config": None}, ""),
        ({}, ""),
    ],
)
def test_the_draft_of_vllm_survives_a_release_by_a_backup(
    options: dict[str, Any], draft: str
) -> None:
    policy = release_policy("path", with_draft(options), WeightUpdate.FULL)
    assert policy.weights_cpu_backup is bool(draft)
    expected = f"CPU backup (no push contains the draft {draft}), then the push"
    assert policy.weights_from == (expected if draft else "the push (all tensors)")
    refused = with_draft(options, backup=False)
    if draft:
        with pytest.raises(ConfigError, match=r"the draft .* would be corrupt after an offload"):
            release_policy("path", refused, WeightUpdate.FULL)
    else:
        assert not release_policy("path", refused, WeightUpdate.FULL).weights_cpu_backup


def test_a_draft_of_sglang_has_a_backup_of_its_own() -> None:
    group = with_draft({"speculative-algorithm": "EAGLE3"}, "sglang")
    policy = release_policy("path", group, WeightUpdate.FULL)
    assert (policy.weights_cpu_backup, policy.weights_from) == (False, "the push (all tensors)")


DRIFT = (
    "so it drifts from the policy: accepted drafts fall with training (metric "
    "rollout_engine_draft_accepted_ratio)"
)
OF_VLLM = {"speculative-config": {"model": "/draft", "num_speculative_tokens": 3}}
OF_SGLANG = {"speculative-algorithm": "EAGLE3", "speculative-draft-model-path": "/draft"}


@pytest.mark.parametrize(
    ("kind", "options", "offloads", "update", "expected"),
    [
        (
            "vllm",
            OF_VLLM,
            True,
            "full",
            "draft /draft: over an offload its weights are kept by weights_cpu_backup; no push "
            f"contains it, {DRIFT}",
        ),
        (
            "vllm",
            OF_VLLM,
            False,
            "full",
            f"draft /draft: its weights are never released; no push contains it, {DRIFT}",
        ),
        (
            "vllm",
            {"speculative-config": {"method": "mtp"}},
            True,
            "frozen",
            "draft mtp: over an offload its weights are kept by weights_cpu_backup; nothing is "
            "pushed, so it fits the model as it does at the start",
        ),
        (
            "sglang",
            OF_SGLANG,
            True,
            "full",
            "draft /draft: over an offload its weights are kept by enable-draft-weights-cpu-backup;"
            f" SGLang loads into it only those pushed tensors whose names it has, {DRIFT}",
        ),
        ("vllm", {"speculative-config": {"method": "ngram"}}, True, "full", ""),
        ("sglang", {"speculative-algorithm": "NGRAM"}, True, "full", ""),
        ("embedded", {}, True, "full", ""),
    ],
)
def test_a_note_on_a_draft_has_what_keeps_it_and_that_it_drifts(
    kind: str, options: dict[str, Any], offloads: bool, update: str, expected: str
) -> None:
    engine = {"kind": kind, "gpus": 1, "options": options}
    made = GroupConfig.model_validate({"engine": engine, "needs_offload": offloads})
    policy = release_policy("path", made, WeightUpdate(update))
    note = draft_note(made, WeightUpdate(update), has_backup=policy.weights_cpu_backup)
    assert note == expected


@pytest.mark.parametrize("update", WeightUpdate)
def test_a_group_that_keeps_its_gpus_releases_nothing(update: WeightUpdate) -> None:
    policy = release_policy("path", group(False, needs_offload=False), update)
    assert (policy.tags, policy.weights_cpu_backup) == ((), False)


@pytest.mark.parametrize("update", WeightUpdate)
@pytest.mark.parametrize("needs_offload", [True, False])
def test_weights_survive_with_a_backup_or_where_nothing_is_released(update, needs_offload) -> None:
    traits = group_traits("path", group(needs_offload=needs_offload), update)
    assert traits.needs_offload is needs_offload
    assert traits.is_frozen is (update is WeightUpdate.FROZEN)
    assert traits.weights_survive is not (needs_offload and update is WeightUpdate.FULL)


MIB = 1024 * 1024
SAID = {"weights": 500 * MIB, "kv_cache": 500 * MIB}


@pytest.mark.parametrize(
    ("tags", "said", "checkpoint", "least_mib"),
    [
        (("weights", "kv_cache"), SAID, 0, 768),
        (("kv_cache",), SAID, 900 * MIB, 368),
        (("weights", "kv_cache"), SAID, 100 * MIB, 448),
        (("weights", "kv_cache"), {}, 400 * MIB, 168),
        (("kv_cache",), {}, 400 * MIB, 0),
        (("weights",), {}, 10 * MIB, 0),
    ],
)
def test_what_must_come_free_is_what_the_engine_reports_or_half_its_checkpoint(
    tags: tuple[str, ...], said: dict[str, int], checkpoint: int, least_mib: int
) -> None:
    asked = least_freed_bytes([MemoryTag(tag) for tag in tags], said, checkpoint)
    assert asked // MIB == least_mib


@pytest.mark.parametrize(
    ("options", "update", "is_told"),
    [
        ({"enable-elastic-expert-backup": True}, WeightUpdate.FULL, True),
        ({"enable_elastic_expert_backup": True}, WeightUpdate.FULL, True),
        ({"enable-elastic-expert-backup": True}, WeightUpdate.FROZEN, False),
        ({"enable-elastic-expert-backup": False}, WeightUpdate.FULL, False),
        ({}, WeightUpdate.FULL, False),
    ],
)
def test_sglang_s_own_expert_backup_is_passed_on_with_a_warning(
    options: dict[str, bool], update: WeightUpdate, is_told: bool
) -> None:
    group = GroupConfig.model_validate({"engine": {"kind": "sglang", "options": options}})
    note = elastic_backup_note("servers.policy.groups.main", group, update)
    assert ("after the first push it would restore old experts" in note) is is_told
