"""What SECURITY.md says: the tests that it names exist, and claims that no other test shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from rollout.agents.model.chat_tokenizer import load_chat_tokenizer
from rollout.agents.wire.messages import BadChat
from rollout.cli.report import render_report
from rollout.observability.timeline.span import Kind, Span
from tests.support.chat_models import write_chat_model

ROOT = Path(__file__).parents[1]
STATIC = ROOT / "rollout" / "observability" / "page" / "static"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def test_what_the_page_names_exists() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    named = set(re.findall(r"`((?:tests|engines|rollout)/[\w./-]+)`", text))
    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_a_models_output_is_text_in_a_report() -> None:
    span = Span(Kind.PHASE, HOSTILE, HOSTILE, 0.0, 1.0)
    names = "prompt", "reply", "reward", "tokens", "engines", "versions", "status"
    sample = dict.fromkeys(names, HOSTILE)
    figures = [{"step": 1, "metrics": {f"eval/{HOSTILE}/mean": 1.0}, "samples": [sample]}]
    page = render_report(HOSTILE, HOSTILE, figures, [span], [])
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "script-src" in page


def test_no_script_of_the_page_makes_elements_of_text() -> None:
    scripts = sorted(STATIC.glob("*.js"))
    assert len(scripts) > 5
    makers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    assert [path.name for path in scripts if re.search(makers, path.read_text())] == []


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ strftime_now.__globals__['__builtins__'] }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_chat_template_of_a_checkpoint_reaches_no_python(tmp_path: Path, template: str) -> None:
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    model = write_chat_model(tmp_path, template)
    bound = load_chat_tokenizer(str(model)).bound(None, {})
    with pytest.raises(BadChat, match=r"unsafe|not safe"):
        bound.render([{"role": "user", "content": "x"}], for_answer=True)


def test_no_program_of_a_checkpoint_is_run_by_us() -> None:
    """Engines get what the user gives them; see ``trust-remote-code`` of SGLang and vLLM."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for package in ("rollout", "engines")
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code"
    ]
    assert found == []
