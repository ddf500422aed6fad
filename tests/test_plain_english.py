"""What `codespell` cannot look for: phrases of several words, and parts of names.

`.ci/plain_words.txt` has the words to avoid, each with what to write instead.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A space stands for any white space; names of code have something directly before or after them.
PHRASES = {
    r"d(ie|ies|ied|ying) of": "crashes on, is killed by",
    r"of one's own|of its own accord|by its word": "its own, by itself, as it reports",
    r"what( \w+){1,3} left": "leftovers, the rest",
    r"(is|are|was|were|be|been|being|gets?) asked|asks (it|them)": "query, request, send",
    r"(is|are|was|were|be|being|been|stays?|feels?) well(?! \w)": "healthy",
}
READ = (
    *("CONTRIBUTING.md", "Makefile", "README.md", "SECURITY.md", "mkdocs.yml", ".ci/run"),
    *(".ci", ".github", "benchmarks", "docs", "engines", "examples", "rollout", "tests"),
    "tools",
)
SUFFIXES = {".py", ".md", ".js", ".css", ".c", ".html", ".yml", ".yaml", ".in", ".json"}
NAME_WORDS = re.compile(r"carrier|makers?|handover|proved?|told|said", re.IGNORECASE)


def phrases_in(text: str) -> list[str]:
    return [
        f"{' '.join(match[0].split())!r}: {plain}"
        for pattern, plain in PHRASES.items()
        for match in re.finditer(
            rf"(?<![\w.`])({pattern})(?![\w(=`])".replace(" ", r"(?:\s|#)+"), text, re.IGNORECASE
        )
    ]


def test_no_text_has_a_phrase_that_is_not_plain() -> None:
    paths = {path for name in READ for path in (ROOT / name).rglob("*") if path.suffix in SUFFIXES}
    paths |= {ROOT / name for name in READ if (ROOT / name).is_file()}
    found = {path: phrases_in(path.read_text()) for path in paths - {Path(__file__)}}
    assert {path: hits for path, hits in found.items() if hits} == {}


SAMPLES = (
    *("SGLang dies of it", "to die\n    # of", "by its word", "what it has left", "it is asked"),
    "the engine is well.",
)


@pytest.mark.parametrize("sample", SAMPLES)
def test_each_phrase_is_caught(sample: str) -> None:
    assert len(phrases_in(sample)) == 1


def names_in(path: Path) -> set[str]:
    """The file, and the classes, functions and attributes that it defines."""
    defined = r"^\s*(?:(?:async )?def |class |self\.)(\w+)(?=\(|:| = )"
    return {path.stem, *re.findall(defined, path.read_text(), re.MULTILINE)}


def test_the_names_of_code_are_plain() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("rollout", "engines")
        for path in (ROOT / folder).rglob("*.py")
        for name in names_in(path)
        for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
        if NAME_WORDS.fullmatch(part)
    ]
    assert found == []


def test_each_word_to_avoid_is_found_in_text_and_not_in_code(tmp_path: Path) -> None:
    (tmp_path / "sample.md").write_text("Nobody\nis told, not `told`.\ntold(kept.said, tell=1)\n")
    (tmp_path / "sample.py").write_text('def told():\n    """It is\n    healed."""\n')
    program = Path(sys.executable).with_name("codespell")
    done = subprocess.run([program, tmp_path], cwd=ROOT, capture_output=True, text=True)
    hits = re.findall(r"sample\.(\w+:\d+: \w+)", done.stdout)
    assert sorted(hits) == ["md:1: Nobody", "md:2: told", "py:3: healed"]


# What other systems call the commands of ``rollout.rules.lifecycle.Command``, as names of code.
OTHER_NAMES = (
    *("pause", "pause_engines", "flush", "release", "release_memory", "release_weights"),
    *("release_kv", "give_memory", "take_memory", "resume", "resume_weights", "resume_kv"),
    *("resume_memory", "resume_generation", "onload", "onload_memory", "wake_up", "sleep"),
    *("continue", "serve_weights"),
)
# They have the names of other systems beside ours.
OF_OTHERS = (
    *("changelog.md", "from-slime.md", "openrlhf.md", "skyrl.md", "trl.md", "verl.md"),
    *("vllm-cpu.md", "vllm.md", "weight_transfer.py"),
)


def other_names_in(text: str) -> list[str]:
    """Names of code in backticks, and methods that are called on a handle or its phases."""
    name = "|".join(OTHER_NAMES)
    return [
        match[0]
        for pattern in (rf"(`+)(?:{name})(?:\(\))?\1(?!`)", rf"\b(policy|phases)\.(?:{name})\(")
        for match in re.finditer(pattern, text)
    ]


def test_no_text_calls_a_command_by_another_name() -> None:
    folders = (ROOT / "docs", ROOT / "examples", ROOT / "rollout", ROOT / "engines/fake")
    paths = {path for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES}
    paths |= {ROOT / name for name in ("CONTRIBUTING.md", "README.md", "SECURITY.md")}
    read = [path for path in paths if path.name not in OF_OTHERS]
    found = {path: other_names_in(path.read_text()) for path in read}
    assert {path: names for path, names in found.items() if names} == {}


def test_another_name_of_a_command_would_be_found() -> None:
    text = "`resume_kv`, ``pause``, policy.phases.release(), `flush_cache`, policy.serve()"
    assert other_names_in(text) == ["`resume_kv`", "``pause``", "phases.release("]


def test_to_push_is_one_thing_wherever_it_is_called() -> None:
    """By a server's handle, by each rank, and in an offload window, whose end it waits for."""
    for file, kind in (
        ("server_handle.py", "ServerHandle"),
        ("deployment_handle.py", "DeploymentHandle"),
        ("pusher.py", "Pusher"),
        ("offload_window.py", "OffloadWindow"),
    ):
        code = ast.parse((ROOT / "rollout/runtime/handle" / file).read_text())
        (methods,) = [
            node.body for node in code.body if isinstance(node, ast.ClassDef) and node.name == kind
        ]
        (push,) = [
            node for node in methods if isinstance(node, ast.FunctionDef) and node.name == "push"
        ]
        first = (ast.get_docstring(push) or "").partition("\n\n")[0].lower()
        assert "these weights, verified and serving" in first, kind
