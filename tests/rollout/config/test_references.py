"""References to other settings and to the environment, in files, dicts and Hydra's configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rollout.config import RolloutConfig
from rollout.core.errors import ConfigError

GROUPS = {"main": {"engine": {"kind": "fake"}}}


def values(**server: Any) -> dict[str, Any]:
    return {"servers": {"policy": {"model_path": "m", "groups": GROUPS, **server}}}


def refusal(of: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        RolloutConfig.from_dict(of)
    return caught.value


def test_a_value_comes_from_the_environment_or_its_default_or_another_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "s3cr3t")
    monkeypatch.delenv("A_PORT", raising=False)
    path = tmp_path / "config.yaml"
    path.write_text(
        "run_id: ab\n"
        "log_dir: /runs/${run_id}\n"
        "servers:\n"
        "  policy:\n"
        "    model_path: ${oc.env:HOME}/tiny\n"
        "    groups: {main: {engine: {kind: fake, env: {A: '\\${B}', C: '${oc.env:A_KEY}'}}}}\n"
        "    router: {client_key: '${oc.env:A_KEY}', port: '${oc.env:A_PORT,80}'}\n"
    )
    config = RolloutConfig.from_file(path)
    server = config.servers["policy"]
    assert config.log_dir == "/runs/ab"
    assert server.model_path == str(Path.home() / "tiny")
    assert (server.router.client_key, server.router.port) == ("s3cr3t", 80)
    assert server.groups["main"].engine.env == {"A": "${B}", "C": "s3cr3t"}
    assert "s3cr3t" not in repr(config)


def test_a_dict_config_of_hydra_is_taken_whole_or_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_NAME", "from_hydra")
    hydra = {
        "model": "/tiny",
        "rollout": values(model_path="${model}") | {"run_id": "${oc.env:A_NAME}"},
    }
    whole = OmegaConf.create(hydra)
    expected = RolloutConfig.from_dict(values(model_path="/tiny") | {"run_id": "from_hydra"})
    assert RolloutConfig.from_dict(whole.rollout) == expected
    part = {"run_id": "from_hydra", "servers": whole.rollout.servers}
    assert RolloutConfig.from_dict(part) == expected
    assert RolloutConfig.from_dict(dict(part, run_id="${oc.env:A_NAME}")) == expected
    assert refusal(OmegaConf.create({})).setting == "servers"
    assert "did you mean 'servers'" in str(refusal(OmegaConf.create({"server": {}})))


@pytest.mark.parametrize(
    ("setting", "written", "reason"),
    [
        ("run_id", "${oc.env:NO_VARIABLE}", "there is no environment variable NO_VARIABLE; set it"),
        (
            "run_id",
            "a-${HOME}",
            "there is no setting HOME; an environment variable is ${oc.env:HOME}",
        ),
        ("log_dir", "${run_id", "no viable alternative"),
        ("log_dir", "${log_dir}", ""),
        ("log_dir", "${no_resolver:1}", "Unsupported interpolation type no_resolver"),
        ("log_dir", "???", "give it in a later file, or as log_dir=value"),
    ],
)
def test_a_reference_that_leads_nowhere_is_named_as_it_is_written(
    setting: str, written: str, reason: str
) -> None:
    error = refusal(values() | {setting: written})
    assert str(error).startswith(f"{setting} = {written}: ")
    assert reason in str(error)
    assert (error.setting, error.value, len(error.mistakes)) == (setting, written, 1)


def test_all_references_and_other_mistakes_are_named_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_VARIABLE", raising=False)
    router = {"port": "${oc.env:NO_VARIABLE}", "prt": 1}
    wrong = values(model_path="${oc.env:NO_VARIABLE}", router=router)
    assert [mistake.setting for mistake in refusal(wrong).mistakes] == [
        "servers.policy.model_path",
        "servers.policy.router.port",
        "servers.policy.router.prt",
    ]


def test_a_part_in_itself_is_refused() -> None:
    groups: dict[str, Any] = {}
    groups["main"] = groups
    assert "a part of the values is in itself" in str(refusal(values(groups=groups)))
    within = {"main": {"engine": "${servers.policy.groups}"}}
    assert "servers.policy.groups" in str(refusal(values(groups=within)))


def test_a_value_of_the_environment_is_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "s3cr3t-token")
    monkeypatch.setenv("A_WORD", "abc")
    token = "${oc.env:A_TOKEN}"
    main = {"num_engines": token, "min_engines": "${oc.env:A_WORD}", "engine": {"kind": "fake"}}
    router = {"client_key": [token], "policy": "${run_id}", "token_failover": {"a": token}}
    error = refusal(values(groups={"main": main}, router=router) | {"run_id": f"x {token}"})
    shown = f"{error} {error.mistakes} {error.value}"
    assert "s3cr3t" not in shown
    assert "abc" not in shown
    group = "servers.policy.groups.main"
    assert f"{group}.num_engines = {token}: Input should be a valid integer" in str(error)
    assert f"{group}.min_engines = ${{oc.env:A_WORD}}: Input" in str(error)


@pytest.mark.parametrize("key", ["s3cr3t${", "s3cr3t${more}", "${s3cr3t}"])
def test_a_key_with_a_wrong_reference_is_not_shown(key: str) -> None:
    error = refusal(values(router={"client_key": key}))
    assert str(error).startswith("servers.policy.router.client_key = (hidden): ")
    assert "s3cr3t" not in f"{error} {error.mistakes} {error.value}"
