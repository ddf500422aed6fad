"""Full, read-only and missing folders: each error names the setting, the path and the way out."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.config import RolloutConfig
from rollout.config.run_dir import RunFolder
from rollout.core.errors import ConfigError, RolloutError, WeightsUnavailable
from rollout.core.os_errors import naming_setting, why_not_writable
from rollout.runtime.local import launch_local
from rollout.runtime.run_lock import RunLock
from rollout.weights.routes.buffers import ShmBufferPool
from rollout.weights.store.node.agent import AgentSettings, StoreAgent
from tests.support.served_fakes import TIMEOUT_S, config, launched


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "free space there"),
        (errno.EDQUOT, "free space there"),
        (errno.EROFS, "make it writable"),
        (errno.EACCES, "make it writable"),
        (errno.ENOTDIR, "to a folder"),
        (errno.ENOENT, "to a folder"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "ulimit -n"),
        (errno.EIO, "check weights.disk_path"),
    ],
)
def test_every_error_of_the_system_has_a_way_out(number: int, said: str) -> None:
    with (
        pytest.raises(ConfigError, match=said) as named,
        naming_setting("weights.disk_path", "/ckpt/{version}"),
    ):
        failing(number)()
    assert "weights.disk_path = '/ckpt/{version}'" in str(named.value)
    assert os.strerror(number) in str(named.value)
    assert named.value.setting == "weights.disk_path"


def test_a_folder_that_cannot_be_made_is_judged_by_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert why_not_writable(tmp_path / "a" / "b") == ""
    assert why_not_writable(tmp_path / "file" / "b") == f"{tmp_path}/file is not a folder"
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests run as root
    assert why_not_writable(tmp_path / "a" / "b") == f"{tmp_path} cannot be written by this user"


def test_a_log_folder_that_is_a_file_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    whole = config(tmp_path).model_copy(update={"log_dir": str(tmp_path / "logs")})
    with pytest.raises(ConfigError, match=r"log_dir = .*logs is not a folder; give a folder"):
        launch_local(whole)


def test_a_log_folder_on_a_full_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    with pytest.raises(
        ConfigError, match=r"log_dir = .*No space left on device .*free space there"
    ):
        RunLock(RunFolder(tmp_path / "exp", "exp"))
    monkeypatch.undo()
    RunLock(RunFolder(tmp_path / "exp", "exp")).release()


def test_too_few_open_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", failing(errno.EMFILE))
    with pytest.raises(ConfigError, match=r"log_dir = .*ulimit -n"):
        RunLock(RunFolder(tmp_path / "exp", "exp"))


@pytest.mark.parametrize("setting", ["shared_memory_path", "store"])
def test_a_missing_folder_in_memory_is_refused_and_not_made(setting: str, tmp_path: Path) -> None:
    missing = tmp_path / "not-mounted"
    value: Any = {"path": str(missing)} if setting == "store" else str(missing)
    whole = config(tmp_path, server={"weights": {setting: value}})
    with pytest.raises(ConfigError, match=r"does not exist; mount a tmpfs there, or use /dev/shm"):
        launch_local(whole)
    assert not missing.exists()


def test_an_agent_of_the_store_does_not_make_the_folder_of_a_missing_tmpfs(tmp_path: Path) -> None:
    base = tmp_path / "not-mounted" / "rollout-store-0"
    with pytest.raises(WeightsUnavailable, match=r"weights.store.path = .*does not exist"):
        StoreAgent(AgentSettings("node", str(base), "run"))
    assert not base.parent.exists()


def push_of(whole: RolloutConfig) -> dict[str, Any]:
    import torch

    from rollout.weights.format.manifest import read_checkpoint_manifest

    manifest = read_checkpoint_manifest(whole.servers["policy"].model_path)
    assert manifest is not None
    return {
        name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
        for name, spec in manifest.tensors.items()
    }


@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "free space there"), (errno.EROFS, "make it writable")]
)
@pytest.mark.torch
def test_a_push_to_a_full_or_read_only_disk_is_named_and_the_next_goes_through(
    number: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"weights": {"transport": "disk", "disk_path": str(tmp_path / "{version}")}}
    with launched(launch_local, tmp_path, {"main": {}}, server=settings) as handle:
        policy = handle["policy"]
        monkeypatch.setattr(os, "fsync", failing(number))
        with pytest.raises(WeightsUnavailable) as named:
            policy.phases.make_push(push_of(handle.config))
        monkeypatch.undo()
        assert "weights.disk_path = " in str(named.value)
        assert said in str(named.value)
        assert policy.phases.make_push(push_of(handle.config)).version == 1
        assert policy.status().result(TIMEOUT_S).phase == "serving"


@pytest.mark.torch
def test_a_push_to_a_full_or_lost_dev_shm_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    settings = {"weights": {"transport": "shared_memory", "shared_memory_path": str(shared)}}
    with launched(launch_local, tmp_path, {"main": {}}, server=settings) as handle:
        tensors = push_of(handle.config)
        monkeypatch.setattr("rollout.weights.routes.buffers.take_space", failing(errno.ENOSPC))
        with pytest.raises(WeightsUnavailable, match=r"weights.shared_memory_path elsewhere") as no:
            handle["policy"].phases.make_push(tensors)
        assert str(shared) in str(no.value)
        monkeypatch.undo()
        monkeypatch.setattr(Path, "mkdir", failing(errno.EROFS))
        with pytest.raises(WeightsUnavailable, match=r"or set weights.shared_memory_path") as no:
            handle["policy"].phases.make_push(tensors)
        assert str(shared) in str(no.value)


@pytest.mark.torch
def test_a_full_dev_shm_is_named_also_by_the_thread_of_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"transport": "shared_memory", "stream": True, "shared_memory_path": str(tmp_path)}
    with launched(launch_local, tmp_path, {"main": {}}, server={"weights": weights}) as handle:
        policy, tensors = handle["policy"], push_of(handle.config)
        monkeypatch.setattr("rollout.weights.routes.buffers.take_space", failing(errno.ENOSPC))
        with pytest.raises(RolloutError, match=r"weights.shared_memory_path elsewhere"):
            policy.push(tensors).result(TIMEOUT_S)


def test_a_small_dev_shm_is_named_with_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.weights.routes.buffers.UNMAP_S", 0.0)
    pool = ShmBufferPool(tmp_path)
    with pytest.raises(WeightsUnavailable, match=r"--shm-size.*weights.shared_memory_path"):
        pool.take(1 << 60)
    pool.close()
