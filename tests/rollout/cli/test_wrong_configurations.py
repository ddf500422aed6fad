"""Wrong configurations and files: each gives a message that names it and status 2, no traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from rollout.cli.main import app
from rollout.config import RolloutConfig
from rollout.core.errors import ConfigError
from rollout.weights.store.node.base_folder import base_folder
from tests.support.builders import write_checkpoint

ONE_GROUP = {"main": {"engine": {"kind": "embedded"}}}
S, G, E = "servers.policy", "servers.policy.groups.main", "servers.policy.groups.main.engine"
W, H = "servers.policy.weights", "servers.policy.health"
NOT_INT = "Input should be a valid integer"
POSITIVE = "Input should be greater than 0"
ATTACHED = {"kind": "attached", "urls": ["http://a:1"]}


class _Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()

# A setting, its wrong value, the path that is named (empty: the same), a part of the message.
WRONG: list[tuple[str, Any, str, str]] = [
    ("run_id", "a/b", "", "at most 63 letters, digits"),
    ("run_id", "", "", "at most 63 letters"),
    ("run_id", "-a", "", "a letter or digit first"),
    ("run_id", "a" * 64, "", "at most 63"),
    ("run_id", 5, "", "valid string"),
    ("run_id", None, "", "valid string"),
    ("log_dir", "", "", "at least 1 character"),
    ("log_dir", "a\0b", "", "the path of a file or folder"),
    ("log_dir", "/dev/null/runs", "", "/dev/null is not a folder"),
    ("log_dir", ["runs"], "", "valid string"),
    ("servers", MISSING, "", "servers is missing"),
    ("servers", {}, "", "at least one entry"),
    ("servers", None, "", "must be a section"),
    ("servers", ["policy"], "", "must be a section"),
    (
        "servers.Policy",
        {"model_path": "m", "groups": ONE_GROUP},
        "",
        "lower-case letters, digits and _",
    ),
    ("servers.policy", None, "", "must be a section"),
    ("servers.policy", "path", "", "must be a section"),
    ("server", {}, "", "did you mean 'servers'?"),
    ("zzz", 1, "", "known: run_id, log_dir, servers, cluster"),
    (f"{S}.model_path", MISSING, "", "servers.policy.model_path is missing"),
    (f"{S}.model_path", 3, "", "valid string"),
    (f"{S}.model_path", "", "", "at least 1 character"),
    (f"{S}.model_path", "/nowhere", "", "there is no directory '/nowhere'"),
    (f"{S}.model_path", "/proc", "", "has no config.json"),
    (f"{S}.model_path", "a\0", "", "the path of a file or folder"),
    (f"{S}.model_pth", "m", "", "did you mean 'model_path'?"),
    (f"{S}.groups", MISSING, "", "groups is missing"),
    (f"{S}.groups", {}, "", "at least one entry"),
    (f"{S}.groups", [], "", "must be a section"),
    (f"{S}.groups.Main", ONE_GROUP["main"], "", "lower-case letters"),
    (f"{S}.groups.a-b", ONE_GROUP["main"], "", "lower-case letters"),
    (f"{G}.engine", MISSING, "", f"{G}.engine is missing; it needs kind, one of embedded, sglang"),
    (f"{E}.kind", MISSING, "", f"{E}.kind is missing, one of embedded, sglang, vllm, fake"),
    (f"{S}.group", {}, "", "did you mean 'groups'?"),
    (f"{G}.num_engines", 0, "", "greater than or equal to 1"),
    (f"{G}.num_engines", -3, "", "greater than or equal to 1"),
    (f"{G}.num_engines", "two", "", NOT_INT),
    (f"{G}.num_engines", 1.5, "", NOT_INT),
    (f"{G}.num_engines", True, "", "a number, not true or false"),
    (f"{G}.num_engines", None, "", NOT_INT),
    (f"{G}.num_engine", 1, "", "did you mean 'num_engines'?"),
    (f"{G}.worker_type", "decoder", "", "'regular', 'prefill', 'decode'"),
    (f"{G}.min_engines", 3, "", "min_engines 3 is over num_engines 1"),
    (f"{G}.min_engines", -1, "", "greater than or equal to 0"),
    (f"{G}.needs_offload", "maybe", "", "valid boolean"),
    (f"{E}", None, "", "must be a section"),
    (f"{E}.kind", "trtllm", "", "'embedded', 'sglang', "),
    (f"{E}.gpus", -1, "", "greater than or equal to 0"),
    (f"{E}.gpus", "all", "", NOT_INT),
    (f"{E}.gpu", 1, "", "did you mean 'gpus'?"),
    (f"{E}.nodes", 0, "", "greater than or equal to 1"),
    (f"{E}.nodes", 2, "", "an engine of kind embedded runs on one node"),
    (f"{E}", {"kind": "sglang", "gpus": 3, "nodes": 2}, f"{E}.gpus", "divided equally"),
    (f"{E}.cpus", 0, "", POSITIVE),
    (f"{E}.cpus", float("nan"), "", "finite number"),
    (f"{E}.start_timeout_s", 0, "", POSITIVE),
    (f"{E}.start_timeout_s", float("inf"), "", "finite number"),
    (f"{E}.start_timeout_s", "5m", "", "without a unit, here 300 seconds"),
    (f"{E}.start_timeout_s", True, "", "not true or false"),
    (f"{E}.kill_timeout_s", 0, "", POSITIVE),
    (f"{E}.weights_cpu_backup", "maybe", "", "valid boolean"),
    (f"{E}.options", ["port"], "", "must be a section"),
    (f"{E}.options", {"port": 1}, E, "port (chosen at launch)"),
    (f"{E}.options", {"host": "x"}, E, "host (chosen at launch)"),
    (f"{E}.options", {"model-path": "x"}, E, "model_path (the server's model_path)"),
    (f"{E}.options", {"zzz": 1}, E, "the embedded engine has no options zzz"),
    (f"{E}.options", {"a-b": 1, "a_b": 1}, E, "given twice, in two spellings"),
    (f"{E}", {"kind": "sglang", "options": {"api-key": "x"}}, E, "makes its own keys"),
    (f"{E}", {"kind": "sglang", "gpus": 2, "options": {"tp": 4}}, E, "has 2 GPUs"),
    (f"{E}", {"kind": "sglang", "options": {"tp": "x"}}, E, "a number of ranks"),
    (f"{E}", {"kind": "sglang", "env": {"SGLANG_RUST_SERVER": "1"}}, E, "control endpoints"),
    (f"{E}.python", "/no/python", "", "it does not exist"),
    (f"{E}.python", "/dev/null", "", "it cannot be executed"),
    (f"{E}.env", {"A": 1}, f"{E}.env.A", "valid string"),
    (f"{E}.env", {"A=B": "1"}, f"{E}.env", "'A=B' cannot be an environment variable"),
    (f"{E}.urls", ["http://a:1"], "", "urls are for engines of kind attached"),
    (f"{E}.urls", "http://a:1", "", "must be a list, such as [http://a:1]"),
    (f"{E}", {"kind": "attached"}, f"{E}.urls", "needs urls"),
    (f"{E}", ATTACHED | {"urls": ["a:1"]}, f"{E}.urls", "which is http://host:port"),
    (f"{E}", ATTACHED | {"urls": ["http://a:99999"]}, f"{E}.urls", "is no address"),
    (f"{E}", ATTACHED | {"urls": ["http://a:1"] * 2}, f"{E}.urls", "name an engine twice"),
    (f"{E}", ATTACHED | {"gpus": 1}, f"{E}.gpus", "does not launch attached engines"),
    (G, {"num_engines": 2, "engine": ATTACHED}, f"{G}.num_engines", "leave num_engines out"),
    (f"{G}.standby", 2, "", "less than or equal to 1"),
    (G, {"standby": 1, "engine": ATTACHED}, f"{G}.standby", "launches no engine of the group"),
    (
        G,
        {"standby": 1, "needs_offload": False, "engine": {"kind": "fake", "gpus": 1}},
        f"{G}.standby",
        "an engine on GPUs keeps its memory",
    ),
    (f"{S}.router.port", 70000, "", "less than or equal to 65535"),
    (f"{S}.router.policy", "round_robin", "", "'affinity', 'least_in_flight' or 'prefix'"),
    (f"{S}.router.token_failover", "sometimes", "", "'off', 'asked' or 'on'"),
    (f"{S}.router.tool_call_parser", "hermes", "", "is gone; set agents.tool_call_parser"),
    (f"{S}.router.max_session_bytes", 1, "", "is gone; set agents.max_session_bytes"),
    (f"{S}.router.session_ttl_s", 1, "", "is gone; set agents.session_ttl_s"),
    (f"{S}.router.hold_timeout_s", -1, "", POSITIVE),
    (f"{S}.router.max_sessions", 9, "", "is gone; set agents.max_sessions: sessions are served"),
    (f"{S}.agents.workers", -1, "", "greater than or equal to 0"),
    (f"{S}.agents.tool_call_parser", "qwen25", "", "'auto', 'hermes'"),
    (f"{S}.agents.max_sessions", 0, "", "greater than or equal to 1"),
    (f"{S}.agents", {"workers": 3, "port": 65534}, f"{S}.agents.port", "at most 65533"),
    (f"{S}.page.host", "0.0.0.0", "", "set page.key"),
    (f"{S}.page.port", -1, "", "greater than or equal to 0"),
    (f"{S}.lifecycle.drain", "kill", "", "'abort', 'retract' or 'finish'"),
    (f"{S}.lifecycle.on_failure", "ignore", "", "'fence' or 'raise'"),
    (f"{S}.verify.by", "hope", "", "'fingerprint', 'canary' or 'version'"),
    (f"{S}.verify.canary_prompts", [[1]], f"{S}.verify.canary_prompts.0", "at least one"),
    (f"{S}.lifecycle.verify_by", "canary", "", "'verify_by' is gone; set verify.by"),
    (f"{S}.lifecycle.sentinel", False, "", "'sentinel' is gone; set verify.sentinel"),
    (f"{S}.lifecycle.canary_prompts", [[1, 2]], "", "is gone; set verify.canary_prompts"),
    (f"{S}.lifecycle.canary_tolerance", 1.0, "", "is gone; set verify.canary_tolerance"),
    (f"{W}.fingerprint", False, "", "'fingerprint' is gone; set verify.fingerprints"),
    (f"{S}.lifecycle.command_timeout_s", "1 min", "", "here 60 seconds"),
    (f"{S}.lifecycle.command_timeout", 1, "", "did you mean 'command_timeout_s'?"),
    (f"{S}.page.enabled", False, "", "'enabled' is gone; leave it out: each server has its page"),
    (f"{S}.timeline.enabled", False, "", "unknown key 'enabled'"),
    (f"{H}.probes_to_suspect", 9, "", "'probes_to_suspect' is gone; leave it out"),
    (f"{S}.lifecycle.pause_timeout_s", 9, "", "is gone; set lifecycle.command_timeout_s"),
    (f"{S}.lifecycle.resume_timeout_s", 9, "", "is gone; set lifecycle.memory_timeout_s"),
    (f"{S}.lifecycle.lock_timeout_s", 9, "", "is gone; leave it out: a command waits for the one"),
    (f"{S}.lifecycle.stop_timeout_s", 9, "", "is gone; leave it out: it is fixed"),
    (f"{S}.router.max_failovers", 9, "", "'max_failovers' is gone; leave it out"),
    (f"{H}.weights_path", "/ckpt", "", "must contain {version}"),
    (f"{H}.max_restarts", -1, "", "greater than or equal to 0"),
    (f"{W}.update", "all", "", "'full', 'partial', 'lora' or 'frozen'"),
    (f"{W}.adapters", [], "", "must have at least one entry"),
    (f"{W}.adapters", ["a", "b@1"], f"{W}.adapters.1", "should match pattern"),
    (f"{W}.adapters", ["a", "a"], "", "each name once, not a, a"),
    (f"{W}.not_pushed", ["mpt.*"], "", "'mpt.*' matches no tensor"),
    (f"{W}.not_pushed", ["model.layer.0.*"], "", "names like it: model.layers.0.mlp.weight"),
    (f"{W}.not_pushed", ["*"], "", "no tensor is left"),
    (f"{W}.frozen", ["*"], "", "no tensor is left"),
    (f"{W}.frozen", ["model.visual.*"], "", "matches no tensor"),
    (f"{W}.not_pushed", "mtp.*", "", "must be a list, such as [mtp.*]"),
    (
        f"{W}",
        {"update": "partial", "not_pushed": ["lm_head.*"]},
        f"{W}.not_pushed",
        "may leave out any tensor",
    ),
    (f"{W}.transport", "rdma", "", "'auto', 'by_value'"),
    (f"{W}.transport", "tensor", "", "it is called by_value now"),
    (f"{W}.transport", "disk", f"{W}.disk_path", "needs disk_path"),
    (f"{W}.disk_path", "/ckpt", "", "must contain {version}"),
    (f"{W}", {"transport": "disk", "disk_path": "/dev/null/{version}"}, f"{W}.disk_path", "folder"),
    (f"{W}.bucket_bytes", "1GB", "", "here 1000000000 bytes"),
    (f"{W}.shared_memory_path", "/nowhere", "", "does not exist; mount a tmpfs there"),
    (f"{W}.shared_memory_path", "/dev/null", "", "is no folder"),
    (f"{W}.backend", "mpi", "", "'auto', 'gloo' or 'nccl'"),
    (
        f"{W}",
        {"transport": "distributed", "backend": "nccl"},
        f"{W}.backend",
        "group main: its engines run on the CPU, and NCCL needs a GPU for each process",
    ),
    (
        f"{E}",
        {"kind": "sglang", "options": {"quantization": "fp8"}},
        f"{E}.options.quantization",
        "the first push would end the engine",
    ),
    (f"{W}.store", "yes please", "", "must be a section"),
    (f"{W}.store", {"path": "/nowhere"}, f"{W}.store.path", "does not exist"),
    (f"{W}.store", {"replicas": 0}, f"{W}.store.replicas", "greater than or equal to 1"),
    (f"{W}", {"store": True, "update": "frozen"}, f"{W}.store", "leave out weights.store"),
    (f"{S}.timeline.otel", "x", "", "valid boolean"),
    ("cluster.adress", "auto", "", "did you mean 'address'?"),
    ("cluster.trainer_gpus", -1, "", "greater than or equal to 0"),
]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("right")
    server = {
        "model_path": write_checkpoint(folder),
        "groups": ONE_GROUP,
    }
    return {"log_dir": str(folder), "servers": {"policy": server}}


def changed(values: dict[str, Any], setting: str, value: Any) -> dict[str, Any]:
    """A deep copy of ``values`` with another value at ``setting``."""
    whole = at = json.loads(json.dumps(values))
    *parents, last = setting.split(".")
    for name in parents:
        at = at.setdefault(name, {})
    at[last] = value
    if value is MISSING:
        del at[last]
    return whole


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def validated(folder: Path, values: Any) -> tuple[int, list[dict[str, Any]]]:
    file = folder / "rollout.yaml"
    file.write_text(yaml.safe_dump(values))
    result = run("validate", file, "--json")
    told = json.loads(result.stdout)
    assert told["is_valid"] is not bool(told["mistakes"])
    return result.exit_code, told["mistakes"]


def test_the_configuration_without_a_change_is_right(right: dict[str, Any], tmp_path: Path) -> None:
    assert validated(tmp_path, right) == (0, [])


@pytest.mark.parametrize(
    ("setting", "value", "named", "said"),
    WRONG,
    ids=[f"{setting}={str(value)[:30]!r}" for setting, value, _, _ in WRONG],
)
def test_a_wrong_setting_is_named_with_its_value_and_what_would_work(
    setting: str, value: Any, named: str, said: str, right: dict[str, Any], tmp_path: Path
) -> None:
    if isinstance(value, dict) and value.get("kind") == "sglang":
        value = {"python": "sh"} | value  # any program: it is not started
    status, mistakes = validated(tmp_path, changed(right, setting, value))
    assert status == 2
    (mistake,) = mistakes
    assert mistake["setting"] == (named or setting)
    assert said in mistake["message"]


def test_the_table_has_a_hundred_entries() -> None:
    assert len(WRONG) >= 100


def test_all_mistakes_are_listed_at_once(right: dict[str, Any], tmp_path: Path) -> None:
    chosen = [
        (f"{S}.model_path", "/nowhere"),
        (f"{G}.num_engines", 0),
        (f"{G}.engine.options", {"port": 1}),
        (
            f"{S}.groups.other",
            {"num_engine": 1, "engine": {"kind": "embedded", "python": "/no/python"}},
        ),
        (f"{S}.lifecycle.drain", "kill"),
        (f"{W}.disk_path", "/ckpt"),
        ("cluster.adress", "auto"),
    ]
    values = right
    for setting, value in chosen:
        values = changed(values, setting, value)
    _, mistakes = validated(tmp_path, values)
    assert {mistake["setting"] for mistake in mistakes} == {
        f"{S}.model_path",
        f"{G}.num_engines",
        f"{G}.engine",
        f"{S}.groups.other.num_engine",
        f"{S}.groups.other.engine.python",
        f"{S}.lifecycle.drain",
        f"{W}.disk_path",
        "cluster.adress",
    }
    result = run("validate", tmp_path / "rollout.yaml")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == len(mistakes)


def test_a_mistake_does_not_hide_one_that_needs_the_whole_section(right: dict[str, Any]) -> None:
    group = ONE_GROUP["main"] | {"num_engines": 1, "min_engines": 2, "worker_type": "decoder"}
    with pytest.raises(ConfigError, match="2 settings are wrong") as caught:
        RolloutConfig.from_dict(changed(right, G, group))
    named = [mistake.setting for mistake in caught.value.mistakes]
    assert named == [f"{G}.worker_type", f"{G}.min_engines"]


def test_a_folder_of_the_store_that_may_be_of_another_user_is_named(
    right: dict[str, Any], tmp_path: Path
) -> None:
    planted = base_folder(str(tmp_path))
    planted.symlink_to("/home")
    values = changed(right, f"{W}.store", {"path": str(tmp_path)})
    status, (mistake,) = validated(tmp_path, values)
    assert (status, mistake["setting"]) == (2, f"{W}.store.path")
    assert f"{planted} is a link, of uid {os.getuid()}" in mistake["message"]


def test_two_that_cannot_listen_at_one_address_are_named(right: dict[str, Any]) -> None:
    values = changed(changed(right, f"{S}.router.port", 8000), f"{S}.page.port", 8000)
    with pytest.raises(ConfigError) as caught:
        RolloutConfig.from_dict(values)
    assert "127.0.0.1:8000 is the address of servers.policy.router.port too" in str(caught.value)
    values = changed(changed(right, f"{S}.page.port", 8002), f"{S}.agents.port", 8000)
    values["servers"]["policy"]["agents"]["workers"] = 3
    with pytest.raises(ConfigError) as caught:
        RolloutConfig.from_dict(values)
    assert "127.0.0.1:8002 is the address of servers.policy.agents.port too" in str(caught.value)


def test_an_engine_that_two_groups_have_is_named(right: dict[str, Any]) -> None:
    values = changed(right, f"{S}.router.port", 8000)
    values["servers"]["policy"]["groups"] |= {"a": {"engine": ATTACHED}, "b": {"engine": ATTACHED}}
    with pytest.raises(ConfigError) as caught:
        RolloutConfig.from_dict(values)
    assert "http://a:1 is an engine of servers.policy.groups.a.engine.urls too" in str(caught.value)


def test_a_secret_is_not_shown(right: dict[str, Any], tmp_path: Path) -> None:
    for setting, value in (
        (f"{S}.router.client_key", ["hunter2"]),
        (f"{S}.page", {"key": "hunter2", "host": 5}),
        (f"{S}.page", [{"key": "hunter2"}]),
        (f"{E}.env", {"HF_TOKEN": ["hunter2"]}),
    ):
        _, mistakes = validated(tmp_path, changed(right, setting, value))
        assert mistakes
        assert "hunter2" not in json.dumps(mistakes)


def test_yaml_reads_off_as_false_and_the_router_still_understands_it(
    right: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "rollout.yaml"
    text = yaml.safe_dump(right)
    file.write_text(text.replace("policy:", "policy:\n    router: {token_failover: off}"))
    loaded = RolloutConfig.from_file(file)
    assert loaded.servers["policy"].router.token_failover == "off"


FILES: list[tuple[str, bytes, str]] = [
    ("latin.yaml", "run_id: a\nlog_dir: é\n".encode("latin-1"), "line 2: byte 0xe9 is not UTF-8"),
    ("wide.yaml", "run_id: a".encode("utf-16"), "line 1: byte 0xff is not UTF-8"),
    ("empty.yaml", b"", "this one is empty"),
    ("list.yaml", b"- a\n", "this one is a list"),
    ("text.yaml", b"hello\n", "this one is a str"),
    ("open.yaml", b"run_id: a\nservers: [\n", "line 3"),
    ("tab.yaml", b"run_id: a\n\tservers: 1\n", "line 2, column 1"),
    ("twice.yaml", b"run_id: a\nrun_id: b\n", "line 2, column 1: key 'run_id' is given twice"),
    ("tag.yaml", b"run_id: !!python/name:os.system\n", "line 1"),
    ("date.yaml", b"run_id: 2024-13-45\n", "month must be in 1..12"),
    ("control.yaml", b"run_id: a\x07\n", "cannot parse config"),
    ("alias.yaml", b"servers: *nobody\n", "line 1"),
    ("deep.yaml", b"a: " + b"[" * 5000, "nested too deeply"),
    ("open.json", b'{"run_id": "a",\n "servers": ', "line 2"),
    ("twice.json", b'{"run_id": "a", "run_id": "b"}', "key 'run_id' is given twice"),
    ("deep.json", b"[" * 100_000, "nested too deeply"),
    ("open.toml", b"run_id = 'a'\nservers = [", "at end of document"),
    ("twice.toml", b"run_id = 'a'\nrun_id = 'b'\n", "line 2"),
]


@pytest.mark.parametrize(("name", "content", "said"), FILES, ids=[name for name, _, _ in FILES])
def test_a_file_that_is_no_configuration_is_named_with_its_line(
    name: str, content: bytes, said: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    result = run("validate", file, "--json")
    assert result.exit_code == 2
    (mistake,) = json.loads(result.stdout)["mistakes"]
    assert said in mistake["message"]


@pytest.mark.parametrize("command", ["validate", "plan", "serve"])
def test_each_command_names_the_line(command: str, tmp_path: Path) -> None:
    name, content, said = FILES[-1]
    file = tmp_path / name
    file.write_bytes(content)
    result = run(command, file)
    if command == "validate":
        assert result.exit_code == 2
        assert said in result.stderr
    else:
        assert isinstance(result.exception, ConfigError)  # ``main`` prints it; status 2
        assert said in str(result.exception)


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read config .*: Is a directory"):
        RolloutConfig.from_file(tmp_path)
    for path in (None, 5, b"x"):
        with pytest.raises(ConfigError, match="the path of a config is a str or Path"):
            RolloutConfig.from_file(path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="null byte"):
        RolloutConfig.from_file("a\0b")


def test_toml_and_a_byte_order_mark_are_read(right: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "rollout.toml"
    file.write_text(
        f"log_dir = '{right['log_dir']}'\n[servers.policy]\n"
        f"model_path = '{right['servers']['policy']['model_path']}'\n"
        "[servers.policy.groups.main]\nengine.kind = 'embedded'\n"
    )
    assert RolloutConfig.from_file(file) == RolloutConfig.from_dict(right)
    marked = tmp_path / "rollout.json"
    marked.write_bytes(b"\xef\xbb\xbf" + json.dumps(right).encode())
    assert RolloutConfig.from_file(marked) == RolloutConfig.from_dict(right)
