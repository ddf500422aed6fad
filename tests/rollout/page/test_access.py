"""Who may look at the page, and who may steer."""

import pytest

from rollout.config import is_loopback
from rollout.page.access import Access

LOCAL = {"host": "127.0.0.1:8000"}


def bearer(key: str) -> dict[str, str]:
    return {"host": "node-1:8000", "authorization": f"Bearer {key}"}


def test_on_loopback_without_a_key_this_machine_may_look_and_nobody_may_steer() -> None:
    access = Access(key="", control_key="", host="127.0.0.1")
    assert access.may_look(LOCAL)
    assert not access.may_steer(LOCAL | {"authorization": "Bearer "})


@pytest.mark.parametrize("host", ["evil.example:8000", "", "127.0.0.1.evil.example"])
def test_a_request_that_a_foreign_site_led_here_is_refused(host: str) -> None:
    access = Access(key="", control_key="", host="127.0.0.1")
    assert not access.may_look({"host": host})


@pytest.mark.parametrize("host", ["localhost:8000", "[::1]:8000", "127.0.0.1"])
def test_every_name_of_this_machine_will_do(host: str) -> None:
    assert Access(key="", control_key="", host="127.0.0.1").may_look({"host": host})


def test_with_a_key_only_who_has_it_may_look() -> None:
    access = Access(key="look", control_key="steer", host="0.0.0.0")
    assert access.may_look(bearer("look"))
    assert access.may_look(bearer("steer"))
    assert access.may_look({"cookie": "rollout_key=look"})
    for wrong in (bearer("loo"), bearer(""), {"cookie": "rollout_key=x"}, {"cookie": "\x00;="}, {}):
        assert not access.may_look(wrong)


def test_only_the_control_key_steers_and_never_as_a_cookie() -> None:
    access = Access(key="look", control_key="steer", host="0.0.0.0")
    assert access.may_steer(bearer("steer"))
    assert not access.may_steer(bearer("look"))
    assert not access.may_steer({"cookie": "rollout_key=steer"})


@pytest.mark.parametrize(
    ("host", "is_so"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("node", False)],
)
def test_what_is_loopback(host: str, is_so: bool) -> None:
    assert is_loopback(host) is is_so
