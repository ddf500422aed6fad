"""Leaves a test out for the kinds that it has nothing to say about."""

from __future__ import annotations

import pytest


def not_for(*kinds: object) -> pytest.MarkDecorator:
    """Mark a test that takes a kind as a parameter: it is not run with these."""
    return pytest.mark.not_for(*kinds)


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect them: a skipped test is one that this machine cannot run."""
    left_out = [item for item in items if _is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _is_left_out(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and any(
        isinstance(value, str | int) and value in marker.args
        for marker in item.iter_markers("not_for")
        for value in callspec.params.values()
    )
