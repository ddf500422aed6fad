"""Hub ids as ``model_path``, downloaded from a double of the Hub over its HTTP API."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rollout.config import RolloutConfig
from rollout.config.root import check_paths
from rollout.config.sources import hub as hub_module
from rollout.config.sources.hub import HubModel
from rollout.core.errors import ConfigError
from tests.support.builders import write_checkpoint
from tests.support.hub_double import COMMIT, Hub, serving

pytest.importorskip("huggingface_hub")

REPO = "tiny/model"
OTHERS = {"pytorch_model.bin": b"0", "original/weights.pth": b"0"}
LAUNCH = """
import rollout
config = rollout.RolloutConfig.from_file("c.yaml")
with rollout.launch(config) as deployment:
    print(deployment["policy"].status().result().phase)
"""
REFUSED = """
import sys, rollout
for model_path in sys.argv[1:]:
    groups = {"main": {"engine": {"kind": "fake"}}}
    servers = {"policy": {"model_path": model_path, "groups": groups}}
    try:
        rollout.launch(rollout.RolloutConfig.from_dict({"servers": servers}))
    except rollout.ConfigError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = Path(write_checkpoint(tmp_path_factory.mktemp("model")))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with serving(REPO, files | OTHERS) as hub:
        yield hub


def write_config(folder: Path, model_path: str) -> None:
    groups = {"main": {"engine": {"kind": "fake"}}}
    servers = {"policy": {"model_path": model_path, "groups": groups}}
    (folder / "c.yaml").write_text(yaml.safe_dump({"servers": servers}))


def run(
    *arguments: str, folder: Path, hub: Hub, **variables: str
) -> subprocess.CompletedProcess[str]:
    """In another process: the library reads its variables when it is imported."""
    mine = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "cache"), "HF_HUB_DISABLE_XET": "1"}
    others = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=others | mine | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_a_model_is_downloaded_once_at_launch_and_then_also_used_offline(
    hub: Hub, tmp_path: Path
) -> None:
    write_config(tmp_path, f"{REPO}@v1")
    done = run("-c", LAUNCH, folder=tmp_path, hub=hub)
    assert done.stdout.split() == ["serving"], done.stderr
    assert "Fetching" in done.stderr, "no progress bar"
    snapshot = tmp_path / f"cache/hub/models--tiny--model/snapshots/{COMMIT}"
    assert {path.name for path in snapshot.iterdir()} == set(hub.files) - set(OTHERS)
    assert not [line for line in hub.requests if any(name in line for name in OTHERS)]

    hub.requests.clear()
    offline = run("-c", LAUNCH, folder=tmp_path, hub=hub, HF_HUB_OFFLINE="1")
    assert offline.stdout.split() == ["serving"], offline.stderr
    assert hub.requests == []


@pytest.mark.slow  # four programs
def test_the_commands_download_nothing(hub: Hub, tmp_path: Path) -> None:
    write_config(tmp_path, f"{REPO}@v1")
    valid = run("-m", "rollout", "validate", "c.yaml", folder=tmp_path, hub=hub)
    assert (valid.returncode, "a launch gets tiny/model@v1" in valid.stderr) == (0, True)
    planned = run("-m", "rollout", "plan", "c.yaml", folder=tmp_path, hub=hub)
    assert planned.returncode == 2
    way = "nothing is downloaded here; get it with `hf download tiny/model --revision v1`"
    assert way in planned.stderr
    assert not (tmp_path / "cache").exists()
    run("-c", LAUNCH, folder=tmp_path, hub=hub)
    planned = run("-m", "rollout", "plan", "c.yaml", folder=tmp_path, hub=hub)
    assert planned.returncode == 0, planned.stderr


@pytest.mark.parametrize(
    ("variables", "refusals"),
    [
        ({"HF_HUB_OFFLINE": "1"}, {REPO: "HF_HUB_OFFLINE is set; get it with `hf download tiny/m"}),
        (
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            {REPO: "the Hub cannot be reached; get it with `hf"},
        ),
        (
            {},
            {
                f"{REPO}@v9": "the Hub has no revision 'v9' of tiny/model",
                "tiny/nothing": "is neither a folder nor a model of the Hub; a private one needs",
                "tiny/gated": "the Hub asks to accept its terms",
            },
        ),
    ],
    ids=["offline", "unreachable", "refused"],
)
def test_a_model_that_cannot_be_had_is_refused_in_words(
    hub: Hub, tmp_path: Path, variables: dict[str, str], refusals: dict[str, str]
) -> None:
    done = run("-c", REFUSED, *refusals, folder=tmp_path, hub=hub, **variables)
    lines = [line for line in done.stdout.splitlines() if line.startswith("servers.")]
    assert len(lines) == len(refusals), done.stderr
    for line, (model_path, words) in zip(lines, refusals.items(), strict=True):
        assert line.startswith(f"servers.policy.model_path = {model_path!r}: ")
        assert words in line


def test_a_folder_of_that_name_wins_and_without_the_library_an_id_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model_path() -> str:
        return RolloutConfig.from_file(tmp_path / "c.yaml").servers["policy"].model_path

    monkeypatch.chdir(tmp_path)
    write_config(tmp_path, "tiny/here")
    assert model_path() == "tiny/here"
    assert HubModel.named("tiny/here") == HubModel("tiny/here", "main")
    monkeypatch.setattr(hub_module, "has_hub", lambda: False)
    assert model_path() == str(tmp_path / "tiny/here")
    with pytest.raises(
        ConfigError,
        match=r"`hf download tiny/here --local-dir here`, or .* huggingface_hub is installed",
    ):
        check_paths(RolloutConfig.from_file(tmp_path / "c.yaml"))
    monkeypatch.undo()
    write_config(tmp_path, "/models/here")
    with pytest.raises(ConfigError, match=r"'/models/here'; .* or its id on the Hub, such as"):
        check_paths(RolloutConfig.from_file(tmp_path / "c.yaml"))
    write_config(tmp_path, "tiny/here")
    (tmp_path / "tiny/here").mkdir(parents=True)
    assert model_path() == str(tmp_path / "tiny/here")


@pytest.mark.parametrize(
    "text", ["model", "/a/b", "./a/b", "a/b/c", "a/b@", "~/a", "../a", "a/b c"]
)
def test_other_texts_are_no_ids(text: str) -> None:
    assert HubModel.named(text) is None


def test_a_folder_of_the_cache_names_its_model_and_commit() -> None:
    folder = f"/cache/hub/models--Qwen--Qwen3-8B/snapshots/{COMMIT}"
    assert HubModel.downloaded(folder) == HubModel("Qwen/Qwen3-8B", COMMIT)
    assert HubModel.named(f"Qwen/Qwen3-8B@{COMMIT}") == HubModel("Qwen/Qwen3-8B", COMMIT)
    assert HubModel.downloaded("/models/Qwen3-8B") is None
