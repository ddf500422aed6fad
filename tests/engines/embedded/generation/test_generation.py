"""How a completion ends and what its meta information says."""

from __future__ import annotations

from engines.embedded.generation.generation import Generation
from engines.embedded.generation.sampling_params import Params


def generation(stop_ids: frozenset[int] = frozenset(), **params: int) -> Generation:
    return Generation("r", [1, 2], Params(**params), stop_ids=stop_ids, return_logprob=True)


def test_it_ends_at_its_length() -> None:
    one = generation(max_new_tokens=2)
    assert not one.add(5, -0.1, "0")
    assert one.add(6, -0.2, "0")
    assert one.finish_reason == {"type": "length", "length": 2}


def test_it_ends_at_a_stop_token_once_it_has_its_minimum() -> None:
    one = generation(frozenset({7}), min_new_tokens=2)
    assert not one.add(7, 0.0, "0")
    assert one.add(7, 0.0, "0")
    assert one.finish_reason == {"type": "stop", "matched": 7}


def test_spans_cover_all_tokens_and_follow_the_version() -> None:
    one = generation()
    for version in ("0", "0", "3"):
        one.add(5, 0.0, version)
    meta = one.meta_info(one.output_ids, "4")
    assert meta["weight_versions"] == [
        {"version": "0", "start": 0, "end": 2},
        {"version": "3", "start": 2, "end": 3},
    ]
    assert meta["weight_version"] == "3"


def test_a_look_in_the_middle_knows_only_the_tokens_it_saw() -> None:
    one = generation()
    one.add(5, -1.0, "0")
    seen = one.output_ids[:]
    one.add(6, -2.0, "1")
    meta = one.meta_info(seen, "1")
    assert meta["output_token_logprobs"] == [[-1.0, 5, None]]
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 1}]


def test_without_tokens_it_has_the_engines_version_and_no_spans() -> None:
    one = generation()
    one.abort("gone")
    meta = one.meta_info([], "2")
    assert (meta["weight_version"], meta["weight_versions"]) == ("2", [])
    assert meta["finish_reason"]["type"] == "abort"


def test_it_ends_only_once() -> None:
    one = generation(max_new_tokens=1)
    one.add(5, 0.0, "0")
    one.abort("too late")
    assert one.finish_reason == {"type": "length", "length": 1}
