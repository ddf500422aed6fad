"""The limit of open files: logged only if it lowers a setting, or leaves very little."""

import resource

import pytest

from rollout.router.http.engine_pool import check_file_descriptors


@pytest.mark.parametrize(
    ("limit", "wanted", "is_default", "is_told"),
    [
        (20_000, 16_384, True, False),
        (20_000, 16_384, False, True),
        (20_000, 100, False, False),
        (1024, 16_384, True, True),
        (1024, 100, True, False),
    ],
)
def test_a_low_limit_of_open_files_is_told_if_it_matters(
    limit: int,
    wanted: int,
    is_default: bool,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    allowed = check_file_descriptors(wanted, is_default=is_default)
    assert (allowed.engines < wanted) == (limit < 2 * wanted)
    assert allowed.engines + allowed.clients == limit - 128
    assert ("ulimit -Hn" in caplog.text) == is_told
