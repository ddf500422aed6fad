"""When the group of the last push is the one for the next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.protocol import ProcessIdentity
from rollout.weights.routes.broadcast import process_text
from rollout.weights.routes.route import BroadcastMember, from_json, to_json
from rollout.weights.routes.trainer_groups import is_reusable, is_same_group

BEFORE = (BroadcastMember("a", 2, "pa"), BroadcastMember("b", 1, "pb"))
NOW = tuple(replace(one, group="g") for one in BEFORE)


def test_the_same_processes_that_hold_it_are_still_in_it() -> None:
    assert is_same_group("g", BEFORE, NOW)
    assert is_same_group("g", BEFORE, NOW[::-1])


@pytest.mark.parametrize(
    "now",
    [
        (),
        NOW[:1],
        (*NOW, BroadcastMember("c", 1, "pc", "g")),
        (NOW[0], replace(NOW[1], process="another")),
        (NOW[0], replace(NOW[1], process="")),
        (NOW[0], replace(NOW[1], engine_id="c")),
        (NOW[0], replace(NOW[1], num_ranks=2)),
        (NOW[0], replace(NOW[1], group="")),
        (NOW[0], replace(NOW[1], group="h")),
    ],
    ids=["none", "removed", "added", "restarted", "unknown", "other", "ranks", "left", "another"],
)
def test_anything_else_makes_a_new_one(now: tuple[BroadcastMember, ...]) -> None:
    assert not is_same_group("g", BEFORE, now)


def test_an_engine_without_a_known_process_is_never_kept() -> None:
    attached = (BroadcastMember("a", 1, "", "g"),)
    assert not is_reusable(attached)
    assert not is_same_group("g", attached, attached)
    assert not is_reusable(())
    assert is_reusable(BEFORE)


def test_a_process_is_told_by_boot_pid_and_start() -> None:
    one = ProcessIdentity(7, 99, "host", "boot", "token")
    texts = {
        process_text([one]),
        process_text([replace(one, pid=8)]),
        process_text([replace(one, started=100)]),
        process_text([replace(one, boot_id="later")]),
        process_text([one, replace(one, pid=8)]),
    }
    assert len(texts) == 5
    assert process_text([]) == ""


def test_it_travels_as_json() -> None:
    assert from_json(to_json(NOW)) == NOW
