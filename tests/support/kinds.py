"""Leaves a test out for some kinds, or out of the usual run."""

from __future__ import annotations

import pytest


def not_for(*kinds: object) -> pytest.MarkDecorator:
    """Mark a test that takes a kind as a parameter: it is not run with these."""
    return pytest.mark.not_for(*kinds)


def chaos_for(*kinds: object) -> pytest.MarkDecorator:
    """Mark a test that takes a kind as a parameter: with these it is one of ``make test-chaos``."""
    return pytest.mark.chaos_for(*kinds)


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect them: a skipped test is one that this machine cannot run."""
    for item in items:
        if _is_marked(item, "chaos_for"):
            item.add_marker(pytest.mark.chaos)
    left_out = [item for item in items if _is_marked(item, "not_for")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _is_marked(item: pytest.Item, mark: str) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and any(
        isinstance(value, str | int) and value in marker.args
        for marker in item.iter_markers(mark)
        for value in callspec.params.values()
    )
