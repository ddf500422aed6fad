"""Every function, class and method of the public API says what it takes and what it raises."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest

from tests.support.public_names import parameters, public_calls, public_objects

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.embedded
CALLS = public_calls()
RAISES = re.compile(r"\braise |\bcheck_\w+\(|\._check_\w+\(|\b_check_\w+\(")


def document(call: Any) -> str:
    """The docstring without its indentation; a dataclass' generated one does not count."""
    text = inspect.getdoc(call.__func__ if isinstance(call, classmethod) else call) or ""
    is_made = dataclasses.is_dataclass(call) and text.startswith(f"{call.__name__}(")
    return "" if is_made else text


def section(text: str, *titles: str) -> str:
    """The lines below these titles."""
    found = re.findall(rf"^(?:{'|'.join(titles)}):\n((?:(?: .*)?\n?)+)", text, re.MULTILINE)
    return "\n".join(found)


@pytest.mark.parametrize("name", CALLS)
def test_it_has_a_docstring(name: str) -> None:
    assert len(document(CALLS[name]).split()) >= 2


@pytest.mark.parametrize("name", [name for name in CALLS if not inspect.isclass(CALLS[name])])
def test_the_docstring_of_a_call_has_each_parameter(name: str) -> None:
    told = section(document(CALLS[name]), "Args")
    missing = [one for one in parameters(CALLS[name]) if not re.search(rf"\b{one}\b", told)]
    assert missing == []


@pytest.mark.parametrize("name", [name for name in CALLS if inspect.isfunction(CALLS[name])])
def test_the_docstring_of_a_call_that_raises_says_so(name: str) -> None:
    if RAISES.search(inspect.getsource(inspect.unwrap(CALLS[name]))):
        assert section(document(CALLS[name]), "Raises")


def test_the_list_is_that_of_the_package_and_the_page() -> None:
    assert {"launch", "ServerHandle.push", "Pusher.push", "RolloutFunction"} <= set(CALLS)
    assert {"Pending.object_ref", "AgentSession.samples", "math", "rewards.math"} & set(CALLS)
    assert "DeploymentHandle" in public_objects()
    assert parameters(CALLS["ServerHandle.stream"]) == [
        *("token_ids", "sampling", "request_id", "options")
    ]


def test_a_parameter_without_a_word_would_be_found() -> None:
    text = "Do it.\n\nArgs:\n    one: a number.\n    two, three: see there.\n\nRaises:\n    four\n"
    told = section(text, "Args")
    assert re.search(r"\btwo\b", told)
    assert not re.search(r"\bfour\b", told)
