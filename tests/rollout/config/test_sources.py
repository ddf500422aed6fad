"""Several files and overrides: later ones win, and a mistake names what gave its value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollout.cli.main import app
from rollout.config import RolloutConfig
from rollout.config.sources.layers import Sources
from rollout.core.errors import ConfigError, Mistake

MAIN = "servers.policy.groups.main"
BASE = """
run_id: base
servers:
  policy:
    model_path: model
    groups:
      main:
        num_engines: 2
        engine:
          kind: attached
          urls: [http://a:1, http://b:1]
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def written(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_later_files_win_then_overrides_and_sections_are_merged(base: Path) -> None:
    more = written("more.json", json.dumps({"run_id": "json", "cluster": {"namespace": "a"}}))
    last = written("last.toml", 'run_id = "toml"\n[cluster]\ntrainer_gpus = 3\n')
    config = RolloutConfig.from_file(base, more, str(last), overrides=["cluster.namespace=b"])
    assert (config.run_id, config.cluster.namespace, config.cluster.trainer_gpus) == (
        "toml",
        "b",
        3,
    )
    assert config.servers["policy"].groups["main"].engine.urls == ("http://a:1", "http://b:1")


def test_a_list_is_replaced_and_an_override_may_set_one_entry(base: Path) -> None:
    group = {"num_engines": 1, "engine": {"urls": ["http://c:1"]}}
    servers = {"policy": {"groups": {"main": group}}}
    more = written("more.json", json.dumps({"servers": servers}))
    assert urls(RolloutConfig.from_file(base, more)) == ("http://c:1",)
    overrides = [f"{MAIN}.num_engines=2", f"{MAIN}.engine.urls[1]=http://d:1"]
    assert urls(RolloutConfig.from_file(base, overrides=overrides)) == ("http://a:1", "http://d:1")


def test_values_of_overrides_are_yaml(base: Path) -> None:
    overrides = ["servers.policy.router={port: 7, token_failover: on}", "log_dir='7'"]
    overrides += ["servers.policy.health.probe_interval_s=1e1", "cluster.address=null"]
    config = RolloutConfig.from_file(base, overrides=overrides)
    server = config.servers["policy"]
    assert (server.router.port, server.router.token_failover) == (7, "on")
    assert (config.log_dir, server.health.probe_interval_s, config.cluster.address) == (
        "7",
        10.0,
        None,
    )


def test_a_model_path_is_relative_to_the_file_that_gives_it_or_to_the_working_folder(
    base: Path,
) -> None:
    def model_path(*files: Path, **more: list[str]) -> str:
        return RolloutConfig.from_file(base, *files, **more).servers["policy"].model_path

    other = written("sub/other.yaml", "servers: {policy: {model_path: tiny}}")
    silent = written("sub/silent.yaml", "run_id: b")
    assert model_path(other, silent) == "sub/tiny"
    assert model_path(silent) == str(base.parent / "model")
    assert model_path(other, overrides=["servers.policy.model_path=m"]) == "m"


def test_a_mistake_names_the_last_file_with_its_line_or_the_override(base: Path) -> None:
    more = written("more.yaml", "cluster:\n  trainer_gpus: -1\nservers: {policy: {zzz: 1}}\n")
    toml = written("more.toml", "[cluster]\nadress = 'auto'\n")
    overrides = ["run_id=a/b", f"{MAIN}.engine.gpu=2", "servers.polcy.page.port=1"]
    with pytest.raises(ConfigError) as caught:
        RolloutConfig.from_file(base, more, toml, overrides=overrides)
    found = {wrong.setting: str(wrong) for wrong in caught.value.mistakes}
    assert found["cluster.trainer_gpus"].startswith("more.yaml, line 2: cluster.trainer_gpus = -1:")
    assert found["servers.policy.zzz"].startswith("more.yaml, line 3: unknown key 'zzz'")
    assert found["cluster.adress"].startswith("more.toml: unknown key 'adress' in cluster; did you")
    assert found["run_id"].startswith("the override run_id=a/b: run_id = 'a/b': must be")
    gpu = found[f"{MAIN}.engine.gpu"]
    assert gpu.startswith(f"the override {MAIN}.engine.gpu=2: unknown key 'gpu' in ")
    assert "did you mean 'gpus'?" in gpu
    missing = found["servers.polcy.model_path"]
    assert missing.startswith("the override servers.polcy.page.port=1: servers.polcy.model_path is")


def test_a_section_with_a_mistake_is_that_of_a_file_though_an_override_changes_it(
    base: Path,
) -> None:
    sources = Sources.read([base], [f"{MAIN}.engine.cpus=2"])
    (mistake,) = sources.located([Mistake(f"{MAIN}.engine", None, "is wrong")])
    assert str(mistake) == f"{base}, line 9: is wrong"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run_id", "the override 'run_id' is not written key.path=value"),
        ("=1", "the override '=1' is not written key.path=value"),
        ("run_id=[1", "the override run_id=[1: while parsing a flow sequence"),
        ("run_id=${", "the override run_id=${: run_id: "),
        (f"{MAIN}.engine.urls.7=a", f"the override {MAIN}.engine.urls.7=a: "),
        (f"{MAIN}.engine.urls.x=a", f"the override {MAIN}.engine.urls.x=a: "),
    ],
)
def test_an_override_that_does_not_fit_is_named(base: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RolloutConfig.from_file(base, overrides=[override])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("value", ["[s3cr3t]", "s3cr3t${", "[s3cr3t"])
def test_a_wrong_key_in_an_override_is_not_shown(base: Path, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RolloutConfig.from_file(base, overrides=[f"servers.policy.router.client_key={value}"])
    assert str(caught.value).startswith("the override servers.policy.router.client_key=(hidden): ")
    assert "s3cr3t" not in f"{caught.value} {caught.value.mistakes} {caught.value.value}"


def test_a_file_that_is_empty_cannot_be_merged_and_is_named(base: Path) -> None:
    for text in ("", "[1]"):
        with pytest.raises(ConfigError, match=r"^config empty.yaml has no settings"):
            RolloutConfig.from_file(base, written("empty.yaml", text))
    with pytest.raises(ConfigError, match=r"^cannot merge config key.yaml: Incompatible key type"):
        RolloutConfig.from_file(base, written("key.yaml", "null: 1"))


def test_a_file_with_a_part_in_itself_cannot_be_merged(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"^cannot merge config ring.yaml: .* in itself"):
        RolloutConfig.from_file(base, written("ring.yaml", "servers: &a {policy: *a}"))


def test_from_file_takes_a_path_and_a_list_of_overrides(base: Path) -> None:
    with pytest.raises(ConfigError, match="one path or more, and a list of overrides"):
        RolloutConfig.from_file()
    with pytest.raises(ConfigError, match="one path or more, and a list of overrides"):
        RolloutConfig.from_file(base, overrides="run_id=a")


def test_the_commands_take_files_and_overrides_in_any_order(base: Path) -> None:
    written("more=.yaml", "run_id: b")
    run = CliRunner().invoke
    arguments = ["validate", str(base), "run_id=a/b", "./more=.yaml", "--json"]
    done = run(app, arguments)
    assert done.exit_code == 2
    values = json.loads(done.output)
    assert values["config"] == f"{base}, more=.yaml"
    assert {"run_id": "the override run_id=a/b"}.items() <= {
        wrong["setting"]: wrong["source"] for wrong in values["mistakes"]
    }.items()
    for command in ("validate", "plan", "serve"):
        assert run(app, [command]).exit_code == 2
    assert isinstance(run(app, ["plan", "run_id=a"]).exception, ConfigError)


def test_a_plan_counts_the_engines_of_an_override(base: Path) -> None:
    written("model/config.json", "{}")
    fake = [f"{MAIN}.engine={{kind: fake, urls: []}}", f"{MAIN}.num_engines=3"]
    done = CliRunner().invoke(app, ["plan", str(base), *fake, "--json"])
    assert done.exit_code == 0, done.output
    assert [group["num_engines"] for group in json.loads(done.output)["groups"]] == [3]


def urls(config: RolloutConfig) -> tuple[str, ...]:
    return config.servers["policy"].groups["main"].engine.urls
