"""Joining a cluster that wants a token."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.ray


def test_a_process_that_sent_no_token_learns_how_to_send_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollout.runtime.ray.nodes import why_not_joined

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    error = ConnectionError("no cluster")
    assert why_not_joined(error) == "no cluster"
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("secret")
    assert "set RAY_AUTH_MODE=token" in why_not_joined(error)
    assert "secret" not in why_not_joined(error)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert why_not_joined(error) == "no cluster"
