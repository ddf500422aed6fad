"""Every message names the setting by its path and says what would be accepted."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollout.cli.main import app
from rollout.config import RolloutConfig, Transport
from rollout.config.root import check_paths
from rollout.core.errors import ConfigError
from rollout.runtime.local import group_settings

ONE_GROUP = {"main": {"engine": {"kind": "embedded"}}}
MINIMAL = {"servers": {"policy": {"model_path": "model", "groups": ONE_GROUP}}}


def with_group(**group) -> dict:
    groups = {"main": {"engine": {"kind": "embedded"}, **group}}
    return {"servers": {"policy": {"model_path": "model", "groups": groups}}}


def test_a_minimal_config_gives_one_offloading_cpu_engine() -> None:
    group = RolloutConfig.from_dict(MINIMAL).servers["policy"].groups["main"]
    assert (group.num_engines, group.needs_offload, group.engine.gpus) == (1, True, 0)


@pytest.mark.parametrize(
    ("engine", "num_gpus"),
    [
        ({"kind": "sglang"}, 1),
        ({"kind": "sglang", "gpus": 0}, 0),
        ({"kind": "sglang", "options": {"tp": 4, "pp-size": 2}}, 8),
        ({"kind": "sglang", "options": {"tp-size": 2, "dp-size": 2}}, 4),
        ({"kind": "sglang", "options": {"tp": 2, "dp": 2, "enable-dp-attention": True}}, 2),
        ({"kind": "sglang", "options": {"tp": "two"}}, 1),
        ({"kind": "vllm"}, 1),
        ({"kind": "vllm", "options": {"tensor-parallel-size": 2, "max-model-len": 8192}}, 2),
        (
            {
                "kind": "vllm",
                "options": {"--tensor-parallel-size": 2, "pipeline_parallel_size": 3},
            },
            6,
        ),
        ({"kind": "vllm", "urls": ["http://a:1"]}, 0),
        ({"kind": "attached", "urls": ["http://a:1"]}, 0),
        ({"kind": "embedded", "options": {"tp": 2}}, 0),
        ({"kind": "fake"}, 0),
    ],
)
def test_the_gpus_of_an_engine_follow_from_its_kind_and_its_options(
    engine: dict, num_gpus: int
) -> None:
    group = RolloutConfig.from_dict(with_group(engine=engine)).servers["policy"].groups["main"]
    assert group.engine.gpus == num_gpus


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"server": {}}, "unknown key 'server' in the config; did you mean 'servers'?"),
        (
            {"servers": {"policy": {"model_path": "m", "weights": {"strict_caches": True}}}},
            r"'strict_caches' is gone; leave it out: after each push the sentinel asks",
        ),
        (
            with_group(num_engine=2),
            "unknown key 'num_engine' in servers.policy.groups.main; did you mean 'num_engines'?",
        ),
        (
            with_group(engine={"kind": "fake", "gpu": 1}),
            "unknown key 'gpu' in servers.policy.groups.main.engine; did you mean 'gpus'?",
        ),
        (
            MINIMAL | {"cluster": {"adress": "auto"}},
            "unknown key 'adress' in cluster; did you mean 'address'?",
        ),
        (
            MINIMAL | {"cluster": {"zzz": 1}},
            "unknown key 'zzz' in cluster; known: address, namespace",
        ),
        (
            {"servers": {"policy": {"groups": ONE_GROUP}}},
            "servers.policy.model_path is missing",
        ),
        (with_group(num_engines=0), "servers.policy.groups.main.num_engines = 0: "),
        (with_group(worker_type="decoder"), "worker_type = 'decoder': Input should be 'regular'"),
        (with_group(num_engines=1, min_engines=2), "min_engines 2 is over num_engines"),
        ({}, "servers is missing"),
    ],
)
def test_a_wrong_setting_is_named_with_what_would_be_accepted(values, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RolloutConfig.from_dict(values)
    assert message in str(caught.value)


def test_a_typo_is_reported_and_not_the_setting_that_is_missing_because_of_it() -> None:
    values = {"servers": {"policy": {"model_pth": "model", "groups": ONE_GROUP}}}
    with pytest.raises(ConfigError, match=r"did you mean 'model_path'\?$") as caught:
        RolloutConfig.from_dict(values)
    assert [mistake.setting for mistake in caught.value.mistakes] == ["servers.policy.model_pth"]


def test_a_config_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match="a mapping with the key 'servers'; this one is a list"):
        RolloutConfig.from_dict([])  # type: ignore[arg-type]


def test_a_user_may_name_a_group_like_a_setting() -> None:
    groups = {"router": {"num_engins": 1}}
    with pytest.raises(ConfigError, match="did you mean 'num_engines'"):
        RolloutConfig.from_dict({"servers": {"a": {"model_path": "m", "groups": groups}}})


def broadcasting(group: dict, **weights) -> RolloutConfig:
    values = with_group(**group)
    values["servers"]["policy"]["weights"] = {"transport": "distributed", **weights}
    return RolloutConfig.from_dict(values)


def sglang(**engine) -> dict:
    return {"engine": {"kind": "sglang", "gpus": 0, **engine}}


@pytest.mark.parametrize("name", ["pp", "pp_size", "--pp-size", "pipeline-parallel-size"])
def test_pipeline_stages_take_no_broadcast(name: str) -> None:
    with pytest.raises(ConfigError, match="2 pipeline stages with") as caught:
        broadcasting(sglang(gpus=2, options={name: 2}))
    assert caught.value.setting == "servers.policy.groups.main.engine.options"
    broadcasting(sglang(gpus=2, options={"tp": 2, name: 1}))
    broadcasting(sglang(gpus=2, options={name: 2}), transport="by_value")
    broadcasting(sglang(gpus=2, options={name: 2}), update="frozen")


@pytest.mark.parametrize(
    "group",
    [sglang(gpus=1), {"engine": {"kind": "attached", "urls": ["http://a:1"]}}],
    ids=["launched", "attached"],
)
def test_nccl_is_refused_where_engines_share_the_trainers_gpus(group: dict) -> None:
    with pytest.raises(ConfigError, match=r"group main: it offloads, so its .* share") as caught:
        broadcasting(group, backend="nccl")
    assert caught.value.setting == "servers.policy.weights.backend"
    assert broadcasting(group).servers["policy"].why_no_nccl  # auto takes gloo
    config = broadcasting(group | {"needs_offload": False}, backend="nccl")
    assert config.servers["policy"].why_no_nccl == ""


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a", "a"], "each name once"),
        (["a@7"], "a@7"),
        (["base:a"], "base:a"),
        ([], "at least one"),
    ],
)
def test_names_of_adapters_are_distinct_and_have_no_version(names: list[str], words: str) -> None:
    weights = {"update": "lora", "adapters": names}
    server = with_group()["servers"]["policy"] | {"weights": weights}
    with pytest.raises(ConfigError, match=words) as caught:
        RolloutConfig.from_dict({"servers": {"policy": server}})
    assert str(caught.value.setting).startswith("servers.policy.weights.adapters")


def test_what_sglang_sets_for_nccl_is_known_except_for_attached_engines() -> None:
    values = with_group(**sglang())
    values["servers"]["policy"]["groups"] |= {
        "own": sglang(env={"NCCL_CUMEM_ENABLE": "1"}),
        "symmetric": sglang(options={"enable-symm-mem": True}),
        "plain": sglang(options={"enable_symm_mem": False}),
        "experts": sglang(nodes=2, gpus=2, options={"moe-a2a-backend": "deepep_v2"}),
        "nodes": sglang(nodes=2, gpus=2),
        "attached": {"engine": {"kind": "attached", "urls": ["http://a:1"]}},
        "embedded": {"engine": {"kind": "embedded"}},
    }
    found = RolloutConfig.from_dict(values).servers["policy"].nccl_cumem
    assert found == {
        "main": "0",
        "own": "1",
        "symmetric": "1",
        "plain": "0",
        "experts": "1",
        "nodes": None,
        "attached": None,
    }


def test_a_group_knows_how_it_is_pushed_to_and_what_is_not_pushed() -> None:
    config = broadcasting({}, not_pushed=["mtp.*"])
    settings = group_settings(config, "policy", "main")
    assert (settings.transport, settings.not_pushed) == (Transport.DISTRIBUTED, ("mtp.*",))


@pytest.mark.parametrize("name", ["config.json", "config.yaml"])
def test_a_file_gives_the_same_config_as_its_values(tmp_path: Path, name: str) -> None:
    values = {"servers": {"policy": MINIMAL["servers"]["policy"] | {"model_path": "/model"}}}
    (tmp_path / name).write_text(json.dumps(values))
    assert RolloutConfig.from_file(tmp_path / name) == RolloutConfig.from_dict(values)


def test_a_relative_model_path_is_relative_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(json.dumps(MINIMAL))
    found = RolloutConfig.from_file(tmp_path / "config.yaml")
    assert found.servers["policy"].model_path == str(tmp_path / "model")


def test_the_schema_is_printed_and_has_each_setting_with_its_text() -> None:
    schema = json.loads(CliRunner().invoke(app, ["schema"]).stdout)
    group = schema["$defs"]["GroupConfig"]["properties"]
    assert group["num_engines"]["minimum"] == 1
    assert "shares its GPUs" in group["needs_offload"]["description"]
    assert schema["$defs"]["GroupConfig"]["additionalProperties"] is False


WRONG = """\
servers:
  policy:
    model_path: model
    engine: {kind: fake}        # belongs in a group
    groups:
      main:
        num_engines: none
        engine: {kind: fake, start_timeout_s: 2m}
      other:
        engine: {kind: fkae}
"""


def test_mistakes_of_a_file_have_their_lines(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(WRONG)
    with pytest.raises(ConfigError) as caught:
        RolloutConfig.from_file(tmp_path / "config.yaml")
    assert [mistake.line for mistake in caught.value.mistakes] == [4, 7, 8, 10]
    named = (
        f"\n  {tmp_path}/config.yaml, line 4: unknown key 'engine' in servers.policy; it belongs"
    )
    assert named in str(caught.value)
    (tmp_path / "config.yaml").write_text(
        "servers:\n  policy: {groups: {main: {engine: {kind: fake}}}}\n"
    )
    with pytest.raises(
        ConfigError, match=r"^\S+/config.yaml, line 2: servers.policy.model_path is missing"
    ):
        RolloutConfig.from_file(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("section", "key", "home"),
    [
        ({"model_path": "m", "groups": {}}, "engine", "servers.policy.groups.<name>"),
        ({"model_path": "m", "groups": {}}, "num_engines", "servers.policy.groups.<name>"),
        ({"model_path": "m", "groups": {}}, "gpus", "servers.policy.groups.<name>.engine"),
        ({"model_path": "m", "groups": {}}, "transport", "servers.policy.weights"),
    ],
)
def test_a_key_one_level_too_high_is_sent_to_its_section_and_hides_nothing(
    section: dict, key: str, home: str
) -> None:
    values = {"servers": {"policy": section | {key: 2, "groups": ONE_GROUP}}}
    with pytest.raises(ConfigError) as caught:
        RolloutConfig.from_dict(values)
    assert str(caught.value) == f"unknown key {key!r} in servers.policy; it belongs in {home}"


def test_a_key_one_level_too_low_is_sent_to_its_section_too() -> None:
    with pytest.raises(ConfigError, match=r"it belongs in servers.<name>$"):
        RolloutConfig.from_dict(with_group(model_path="m"))


@pytest.mark.parametrize(
    ("weights", "number"),
    [({"bucket_bytes": "4GiB"}, "4294967296 bytes"), ({"bucket_bytes": "2 MB"}, "2000000 bytes")],
)
def test_a_number_with_a_unit_is_given_without_it(weights: dict, number: str) -> None:
    server = with_group()["servers"]["policy"] | {"weights": weights}
    with pytest.raises(ConfigError, match=f"must be a number without a unit, here {number}$"):
        RolloutConfig.from_dict({"servers": {"policy": server}})


@pytest.mark.parametrize(
    ("path", "way"),
    [
        ("~/models/qwen", f"write '{Path.home()}/models/qwen'"),
        ("$HOME/qwen", f"write '{Path.home()}/qwen'"),
        ("${HOME}/qwen", "an environment variable is ${oc.env:HOME}"),
    ],
)
def test_a_model_path_that_is_no_folder_has_the_way_to_one(
    tmp_path: Path, path: str, way: str
) -> None:
    server = {"model_path": path, "groups": ONE_GROUP}
    (tmp_path / "config.json").write_text(json.dumps({"servers": {"policy": server}}))
    with pytest.raises(ConfigError) as caught:
        check_paths(RolloutConfig.from_file(tmp_path / "config.json"))
    assert way in str(caught.value)


def test_a_file_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read config .*absent\.yaml"):
        RolloutConfig.from_file(tmp_path / "absent.yaml")
    (tmp_path / "broken.yaml").write_text("servers: [")
    with pytest.raises(ConfigError, match=r"cannot parse config .*broken\.yaml"):
        RolloutConfig.from_file(tmp_path / "broken.yaml")
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ConfigError, match="this one is empty"):
        RolloutConfig.from_file(tmp_path / "empty.yaml")


def test_a_model_path_must_be_the_folder_of_a_checkpoint(tmp_path: Path) -> None:
    def config(path: Path) -> RolloutConfig:
        groups = ONE_GROUP
        return RolloutConfig.from_dict(
            {"servers": {"policy": {"model_path": str(path), "groups": groups}}}
        )

    with pytest.raises(ConfigError, match=r"servers\.policy\.model_path: there is no directory"):
        check_paths(config(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        check_paths(config(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check_paths(config(tmp_path))


def test_a_config_cannot_be_written_to() -> None:
    config = RolloutConfig.from_dict(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.run_id = "other"


def test_a_push_of_a_draft_is_refused_with_what_works() -> None:
    server = {
        "model_path": "/m",
        "groups": ONE_GROUP,
        "weights": {"draft": "pushed"},
    }
    with pytest.raises(ConfigError, match=r"no push contains a draft: .*; use kept") as caught:
        RolloutConfig.from_dict({"servers": {"policy": server}})
    assert "servers.policy.weights.draft" in str(caught.value)
    server["weights"] = {"draft": "kept"}
    RolloutConfig.from_dict({"servers": {"policy": server}})
