"""Each way weights can be wrong, and what the fingerprints say of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.protocol import WeightsReport
from rollout.rules.fingerprint_check import (
    ALL_TENSORS,
    EngineFingerprints,
    changed_adapter,
    find_mismatches,
    first_difference,
    is_checker_refusal,
    why_inconclusive,
    why_not_as_sent,
    without_adapters,
    without_experts,
)


def report(*digests: str) -> WeightsReport:
    """Tensors ``a``, ``b``, ``c`` with these digests, on one rank."""
    tensors = dict(zip("abc", digests, strict=False))
    return WeightsReport("".join(digests), (tensors,))


BEFORE, GARBAGE, AFTER = report("1", "2", "3"), report("1", "x", "3"), report("4", "5", "6")


def test_unchanged_weights_are_verified() -> None:
    assert (
        find_mismatches(
            {"e-0": EngineFingerprints(BEFORE, BEFORE), "e-1": EngineFingerprints(BEFORE, BEFORE)}
        )
        == {}
    )


def test_garbage_after_a_release_is_found_even_when_every_engine_has_it() -> None:
    wrong = find_mismatches(
        {"e-0": EngineFingerprints(GARBAGE, BEFORE), "e-1": EngineFingerprints(GARBAGE, BEFORE)}
    )
    assert set(wrong) == {"e-0", "e-1"}
    assert "tensor 'b' is not what it was before" in wrong["e-0"]


def test_a_full_push_makes_the_record_void() -> None:
    assert find_mismatches({"e-0": EngineFingerprints(AFTER, BEFORE, ALL_TENSORS)}) == {}


def test_the_minority_is_outvoted_and_its_first_differing_tensor_named() -> None:
    half = report("4", "2", "6")
    wrong = find_mismatches(
        {name: EngineFingerprints(AFTER, None, ALL_TENSORS) for name in ("e-0", "e-2")}
        | {"e-1": EngineFingerprints(half, None, ALL_TENSORS)}
    )
    assert wrong == {"e-1": "tensor 'b' differs from engine e-0 and 1 more"}


def test_two_that_disagree_are_both_refused() -> None:
    wrong = find_mismatches(
        {"e-0": EngineFingerprints(AFTER), "e-1": EngineFingerprints(report("4", "5", "7"))}
    )
    assert set(wrong) == {"e-0", "e-1"}
    assert all("tensor 'c'" in why and "no majority" in why for why in wrong.values())


def test_one_with_lost_weights_has_no_vote() -> None:
    evidence = {
        "e-0": EngineFingerprints(GARBAGE, BEFORE),
        "e-1": EngineFingerprints(BEFORE, BEFORE),
    }
    assert set(find_mismatches(evidence)) == {"e-0"}


@pytest.mark.parametrize(
    ("now", "wrong"),
    [
        (report("9", "2", "3"), False),
        (report("9", "2", "8"), True),
        (report("1", "2", "3"), False),
    ],
)
def test_a_partial_push_may_change_only_what_it_pushed(now: WeightsReport, wrong: bool) -> None:
    assert (
        bool(find_mismatches({"e-0": EngineFingerprints(now, BEFORE, frozenset({"a"}))})) is wrong
    )


def test_a_partial_push_under_other_names_than_the_engines_own_is_not_judged() -> None:
    pushed = frozenset({"model.q_proj.weight"})
    assert find_mismatches({"e-0": EngineFingerprints(AFTER, BEFORE, pushed)}) == {}


def test_ranks_and_missing_tensors_are_differences() -> None:
    first, second = WeightsReport("s", ({"a": "1"},)), WeightsReport("s", ({"a": "1"}, {"a": "1"}))
    assert first_difference(first, second) == "(the checksum of all)"
    assert first_difference(BEFORE, report("1", "2")) == "c"
    assert first_difference(BEFORE, BEFORE) == ""


def test_a_push_without_a_reference_is_inconclusive() -> None:
    pushed = EngineFingerprints(AFTER, BEFORE, ALL_TENSORS)
    assert why_inconclusive(pushed, 1) == ""
    assert "'a'" in why_inconclusive(pushed, 0)
    of_trainer = {"a": "4", "b": "5", "c": "6"}
    same_way = EngineFingerprints(
        report(*(f"xxh3:{value}" for value in "456")),
        None,
        ALL_TENSORS,
        {name: f"xxh3:{value}" for name, value in of_trainer.items()},
    )
    assert why_inconclusive(same_way, 0) == ""
    assert why_inconclusive(EngineFingerprints(BEFORE, BEFORE), 0) == ""
    assert "'a'" in why_inconclusive(EngineFingerprints(AFTER, BEFORE, frozenset({"a"})), 0)


def test_the_fingerprints_of_adapters_are_not_those_of_the_base() -> None:
    report = WeightsReport("t", ({"a": "1", "lora:mine@4:x": "2"},))
    assert without_adapters(report) == WeightsReport("t", ({"a": "1"},))


@pytest.mark.parametrize(
    ("held", "wrong"),
    [
        ({"lora:mine@4:x": "2", "lora:old@1:x": "7"}, ""),
        ({"lora:mine@4:x": "3"}, "lora:mine@4:x"),
        ({}, "lora:mine@4:x"),
    ],
)
def test_an_adapter_is_what_it_was_when_it_was_loaded(held: dict[str, str], wrong: str) -> None:
    adapters = {"mine@4": {"x": "2"}, "unreported@5": {}}
    assert changed_adapter(WeightsReport("t", ({"a": "1", **held},)), adapters) == wrong


@pytest.mark.parametrize(
    ("reported", "is_right"),
    [
        ({"x": "xxh3:1", "y": "xxh3:2"}, True),
        ({"x": "sums:8", "y": "sums:9"}, True),  # which cannot be compared
        ({"x": "xxh3:1", "y": "xxh3:3"}, False),
        ({"x": "xxh3:1"}, False),
        ({}, True),
    ],
)
def test_an_engine_has_loaded_the_adapter_that_was_sent(
    reported: dict[str, str], is_right: bool
) -> None:
    sent = {"lora:mine:x": "xxh3:1", "lora:mine:y": "xxh3:2"}
    why = why_not_as_sent("mine", reported, sent)
    assert why == ("" if is_right else "tensor 'lora:mine:y' is not what the trainer sent")


# -- pipeline stages ------------------------------------------------------------------------------

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def of_stages(first: str, last: str, head: str = EMBEDDING) -> WeightsReport:
    """Each stage has a layer; the last one has the head, under its own name or the embedding's."""
    stages = {EMBEDDING: first, "layers.0": "xxh3:1"}, {head: last, "layers.1": "xxh3:2"}
    return WeightsReport(None, stages)


@pytest.mark.parametrize("head", [EMBEDDING, HEAD])
def test_an_old_head_in_the_last_stage_is_found_with_no_other_engine(head: str) -> None:
    sent = dict.fromkeys((EMBEDDING, head), "xxh3:9")
    sent |= {"layers.0": "xxh3:1", "layers.1": "xxh3:2"}

    def judged(*places: str) -> tuple[dict[str, str], str]:
        report = of_stages(*places, head)
        engine = EngineFingerprints(report, None, ALL_TENSORS, sent)
        return find_mismatches({"e": engine}), why_inconclusive(engine, 0)

    assert judged("xxh3:9", "xxh3:9") == ({}, "")
    wrong = {"e": f"tensor {head!r} is not what the trainer sent"}
    assert judged("xxh3:9", "xxh3:8")[0] == wrong
    assert judged("xxh3:8", "xxh3:9")[0] == {
        "e": f"tensor {EMBEDDING!r} is not what the trainer sent"
    }
    assert f"{head!r}" in judged("xxh3:9", "sums:9")[1]


def test_a_stage_may_change_only_what_was_pushed_to_any() -> None:
    before, now = of_stages("xxh3:7", "xxh3:7"), of_stages("xxh3:9", "xxh3:9")
    pushed = EngineFingerprints(now, before, frozenset({EMBEDDING}))
    assert find_mismatches({"e": pushed}) == {}
    torn = EngineFingerprints(now, before, frozenset({"layers.1"}))
    assert find_mismatches({"e": torn}) == {
        "e": f"tensor {EMBEDDING!r} is not what it was before, and was not pushed"
    }


@pytest.mark.parametrize("changed", [ALL_TENSORS, frozenset()])
def test_stages_without_fingerprints_are_inconclusive_with_or_without_a_push(changed) -> None:
    report = replace(BEFORE, why_partial="it reports fingerprints of 1 of its 2 pipeline stages")
    assert "1 of its 2" in why_inconclusive(EngineFingerprints(report, report, changed), 3)


# -- what has no comparable fingerprint ---------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "has_reported", "is_refusal"),
    [(400, False, True), (400, True, False), (500, False, False), (200, False, False)],
)
def test_only_a_400_of_a_checker_that_never_reported_counts_as_reporting_none(
    status: int, has_reported: bool, is_refusal: bool
) -> None:
    assert is_checker_refusal(status, has_reported=has_reported) is is_refusal


def placed(expert: str, shared: str = "s") -> WeightsReport:
    """An engine whose placement of experts gives this digest."""
    tensors = {
        "model.layers.0.mlp.experts.w13_weight": expert,
        "model.layers.0.mlp.shared_experts.gate_up_proj.weight": shared,
        "model.layers.0.mlp.gate.weight": "g",
    }
    return WeightsReport(f"all of {expert}", (tensors,))


def test_experts_that_lie_differently_make_no_difference_and_all_else_does() -> None:
    def found(*reports: WeightsReport) -> dict[str, str]:
        return find_mismatches(
            {
                f"e-{number}": EngineFingerprints(
                    without_experts(one), None, ALL_TENSORS, moves_experts=True
                )
                for number, one in enumerate(reports)
            }
        )

    assert found(placed("1"), placed("2")) == {}
    assert "shared_experts" in found(placed("1"), placed("2", "other"))["e-1"]


@pytest.mark.parametrize("changed", [ALL_TENSORS, frozenset()])
def test_experts_that_were_left_out_are_inconclusive_with_or_without_a_push(changed) -> None:
    report = without_experts(placed("1"))
    engine = EngineFingerprints(report, report, changed, moves_experts=True)
    assert "enable-eplb" in why_inconclusive(engine, 3)


LAYERS = 3
NORMS = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(LAYERS)]
HEAD_NORMS = [f"model.layers.{layer}.self_attn.q_norm.weight" for layer in range(LAYERS)]
EXPERTS = [f"model.layers.{layer}.mlp.experts.w13_weight" for layer in range(3 * LAYERS)]
MATRICES = [
    f"model.layers.{layer}.{name}" for layer in range(LAYERS) for name in ("qkv", "o", "up")
]


def ranks(*versions: int, num: int | None = None, names: list[str] | None = None) -> WeightsReport:
    """Each rank has a part of each matrix, and all of each norm, at its version.

    Args:
        num: so many matrices are of that version, and the others of version 0.
        names: instead of all.
    """
    tensors = []
    for rank, version in enumerate(versions):
        held = {}
        for index, name in enumerate(names if names is not None else MATRICES):
            is_new = num is None or index < num
            held[name] = f"{name} of {rank} at {version if is_new else 0}"
        if names is None:
            new = version if num is None else 0
            held |= {name: f"{name} at {new}" for name in NORMS + HEAD_NORMS}
        tensors.append(held)
    return WeightsReport(None, tuple(tensors))


@pytest.mark.parametrize("changed", [ALL_TENSORS, frozenset(MATRICES + NORMS + HEAD_NORMS)])
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_has_not_taken_a_push_is_found_without_another_engine(
    late: int, changed: frozenset[str]
) -> None:
    versions = [1, 1]
    versions[late] = 0
    for num in (None, len(MATRICES)):  # the norms may be frozen
        now = ranks(*versions, num=num)
        wrong = find_mismatches({"e-0": EngineFingerprints(now, ranks(0, 0), changed)})
        assert f"rank {late} has not taken the push" in wrong["e-0"]


def test_a_rank_whose_weights_were_lost_and_that_has_not_taken_a_push_is_found() -> None:
    lost = ranks(1, 1).tensors[0], dict.fromkeys(ranks(1).tensors[0], "garbage")
    engine = EngineFingerprints(WeightsReport(None, lost), ranks(0, 0), ALL_TENSORS)
    assert find_mismatches({"e-0": engine}) == {
        "e-0": f"tensor {NORMS[0]!r} of rank 1 is not that of the ranks before it"
    }


@pytest.mark.parametrize(
    "now",
    [
        pytest.param(ranks(1, 1), id="all"),
        pytest.param(ranks(0, 0), id="nothing"),
        pytest.param(ranks(1, 0, num=8), id="few"),
        pytest.param(ranks(1, 0, names=EXPERTS), id="experts of one rank"),
    ],
)
def test_a_push_of_which_a_rank_has_no_part_is_none_that_it_has_not_taken(
    now: WeightsReport,
) -> None:
    before = ranks(0, 0, names=EXPERTS) if EXPERTS[0] in now.tensors[0] else ranks(0, 0)
    assert find_mismatches({"e-0": EngineFingerprints(now, before, ALL_TENSORS)}) == {}


def test_the_stages_of_a_model_have_other_tensors() -> None:
    before = WeightsReport(None, ({"a.norm.weight": "0"}, {"b.norm.weight": "0"}))
    now = WeightsReport(None, ({"a.norm.weight": "1"}, {"b.norm.weight": "0"}))
    assert find_mismatches({"e-0": EngineFingerprints(now, before, ALL_TENSORS)}) == {}


@pytest.mark.parametrize(
    ("name", "is_compared"),
    [
        ("model.norm.weight", True),
        ("model.layers.0.post_attention_layernorm.weight", True),
        ("model.layers.0.self_attn.q_a_layernorm.weight", True),
        ("model.layers.0.self_attn.k_norm.weight", False),
        ("model.layers.0.self_attn.q_layernorm.weight", False),
        ("model.layers.0.self_attn.qkv_proj.bias", False),
    ],
)
def test_a_part_of_a_tensor_that_was_equal_on_all_ranks_may_change_on_one(
    name: str, is_compared: bool
) -> None:
    before = WeightsReport(None, ({name: "ones"}, {name: "ones"}))
    now = WeightsReport(None, ({name: "ones"}, {name: "others"}))
    wrong = find_mismatches({"e-0": EngineFingerprints(now, before, ALL_TENSORS)})
    assert bool(wrong) is is_compared
