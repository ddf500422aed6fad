"""Which requests may view the page, and which may control the server."""

import pytest

from rollout.config.base import is_loopback
from rollout.observability.page.access import Access

LOCAL = {"host": "127.0.0.1:8000"}


def bearer(key: str) -> dict[str, str]:
    return {"host": "node-1:8000", "authorization": f"Bearer {key}"}


def test_on_loopback_without_a_key_this_machine_may_view_and_no_request_may_control() -> None:
    access = Access(key="", control_key="", host="127.0.0.1")
    assert access.may_view(LOCAL)
    assert not access.may_control(LOCAL | {"authorization": "Bearer "})


@pytest.mark.parametrize("host", ["evil.example:8000", "", "127.0.0.1.evil.example"])
def test_a_request_that_another_site_redirected_is_refused(host: str) -> None:
    access = Access(key="", control_key="", host="127.0.0.1")
    assert not access.may_view({"host": host})


@pytest.mark.parametrize("host", ["localhost:8000", "[::1]:8000", "127.0.0.1"])
def test_every_name_of_this_machine_is_accepted(host: str) -> None:
    assert Access(key="", control_key="", host="127.0.0.1").may_view({"host": host})


def test_with_a_key_only_requests_with_a_key_may_view() -> None:
    access = Access(key="look", control_key="steer", host="0.0.0.0")
    assert access.may_view(bearer("look"))
    assert access.may_view(bearer("steer"))
    assert access.may_view({"cookie": "rollout_key=look"})
    for wrong in (bearer("loo"), bearer(""), {"cookie": "rollout_key=x"}, {"cookie": "\x00;="}, {}):
        assert not access.may_view(wrong)


def test_only_the_control_key_may_control_and_never_as_a_cookie() -> None:
    access = Access(key="look", control_key="steer", host="0.0.0.0")
    assert access.may_control(bearer("steer"))
    assert not access.may_control(bearer("look"))
    assert not access.may_control({"cookie": "rollout_key=steer"})


@pytest.mark.parametrize(
    ("host", "is_so"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("node", False)],
)
def test_what_is_loopback(host: str, is_so: bool) -> None:
    assert is_loopback(host) is is_so
