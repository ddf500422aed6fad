"""SGLang applies whole tensors only: deltas that are named are refused, and ``auto`` sends none."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.core.errors import ConfigError
from tests.support import random_deltas
from tests.support.real_policy import RealPolicy

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("known_weights_after"),
]


def test_deltas_to_sglang_are_refused_in_words_before_anything_is_sent(policy: RealPolicy) -> None:
    handle = random_deltas.pushed_by_deltas(policy.handle)
    version = policy.handle.weight_version
    words = (
        r"weights\.encoding = delta: engine .*: it applies whole tensors only; use auto or full$"
    )
    with pytest.raises(ConfigError, match=words):
        handle.push(dict(policy.next_tensors())).result(120)
    assert policy.handle.weight_version == version
    assert policy.is_whole()


def test_auto_sends_sglang_whole_tensors(policy: RealPolicy) -> None:
    handle = random_deltas.pushed_by_deltas(policy.handle, encoding="auto")
    tensors: Any = dict(policy.next_tensors())
    for _ in range(2):
        report = handle.push(tensors).result(120)
        assert random_deltas.sent(report).route == "by_value"
        tensors = random_deltas.changed(tensors, 0.01)
    assert policy.is_whole()
