"""The README shows what is: its diagram and its configuration are the library's own."""

import re
from pathlib import Path

import yaml

from rollout.config import RolloutConfig
from rollout.rules.lifecycle import diagram

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_diagram_is_drawn_from_the_table() -> None:
    assert blocks("mermaid") == [diagram() + "\n"], (
        'stale: python -c "from rollout.rules.lifecycle import diagram; print(diagram())"'
    )


def test_the_configuration_shown_is_valid() -> None:
    for text in blocks("yaml"):
        assert RolloutConfig.from_dict(yaml.safe_load(text)).servers["policy"].groups


def test_the_python_shown_compiles_and_uses_only_public_names() -> None:
    import rollout

    for text in blocks("python"):
        compile(text, "README.md", "exec")
        assert set(re.findall(r"\brollout\.([A-Za-z]\w*)\(", text)) <= set(rollout.__all__)


def test_the_commands_to_try_it_and_to_test_it_come_first() -> None:
    shell, *_ = blocks("")
    assert [line.partition("#")[0].split() for line in shell.splitlines()] == [
        ["make", "quickstart"],
        ["make", "test"],
    ]
    assert README.index(shell) < README.index("```yaml") < README.index("```mermaid")
