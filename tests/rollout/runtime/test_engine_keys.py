"""The keys of launched engines, over engines in processes of their own."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from click.testing import Result
from typer.testing import CliRunner

import rollout
from engines.kinds import KINDS
from rollout.cli.main import app
from rollout.config.run_dir import JOURNAL_FILE, RunFolder
from rollout.control.server.journal import read
from rollout.core.errors import ConfigError
from rollout.core.types import EngineStatus
from rollout.runtime.handle import DeploymentHandle, ServerHandle
from rollout.runtime.local import launch_local
from tests.support.engine_keys import Keys, keys_of
from tests.support.processes import wait_until
from tests.support.served_fakes import config

HEALTH = {"probe_interval_s": 0.1, "backoff_s": 0.05}
BODY = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}


def engine_of(policy: ServerHandle) -> EngineStatus:
    return policy.status().result(30).groups[0].engines[0]


@contextmanager
def launched(folder: Path, **engine: Any) -> Iterator[DeploymentHandle]:
    """One engine in a process of its own."""
    groups = {"main": {"engine": {"kind": "fake", **engine}, "needs_offload": False}}
    with launch_local(config(folder, groups, health=HEALTH)) as deployment:
        yield deployment


def post(engine: EngineStatus, path: str, **options: Any) -> httpx.Response:
    url = f"{engine.endpoint.url}{path}"
    return httpx.post(url, json=BODY, timeout=30, trust_env=False, **options)


def test_a_stranger_neither_samples_nor_pauses_past_the_gate(tmp_path: Path) -> None:
    with launched(tmp_path) as deployment:
        policy = deployment["policy"]
        engine = engine_of(policy)
        for path in ("/generate", "/pause_generation", "/update_weights_from_disk"):
            assert post(engine, path).status_code == 401
        assert post(engine, "/pause_generation", auth=("x", "y")).status_code == 401
        assert len(policy.generate([1, 2, 3]).result(30).output_ids) > 0
        # Not with what the router has for sampling, either.
        headers = {"Authorization": f"Bearer {engine.access.sampling}"}
        assert post(engine, "/pause_generation", headers=headers).status_code == 401
        assert post(engine, "/generate", headers=headers).status_code == 200


def test_without_keys_a_stranger_can(tmp_path: Path) -> None:
    with launched(tmp_path, key=False) as deployment:
        engine = engine_of(deployment["policy"])
        assert engine.access.sampling == engine.access.control == ""
        assert post(engine, "/generate").status_code == 200
        assert post(engine, "/pause_generation").status_code == 200


def test_a_router_in_front_of_engines_with_keys_passes_what_its_clients_send(
    tmp_path: Path,
) -> None:
    with launched(tmp_path) as deployment:
        policy = deployment["policy"]
        for headers in ({}, {"Authorization": "Bearer a client's own"}):
            url = f"{policy.url}/generate"
            reply = httpx.post(url, json=BODY, headers=headers, trust_env=False)
            assert reply.status_code == 200, reply.text
        info = httpx.get(f"{policy.url}/model_info", trust_env=False)
        assert info.status_code == 200
        ended = httpx.post(f"{policy.url}/abort_request", json={"abort_all": True}, trust_env=False)
        assert (ended.status_code, ended.json()["failed"]) == (200, {})


def test_nothing_that_others_can_read_has_a_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with launched(tmp_path) as deployment:
        policy = deployment["policy"]
        policy.generate([1, 2, 3]).result(30)
        status = policy.status().result(30)
        (engine,) = status.groups[0].engines
        folder = RunFolder.of(deployment.config).path
        journal = read(next(folder.rglob(JOURNAL_FILE)))
        shown = [repr(status), repr(asdict(status)), repr(journal), repr(policy)]
        shown += [" ".join(one.cmdline()) for one in psutil.Process().children(recursive=True)]
        shown += [" ".join(psutil.Process(engine.pid).cmdline()), *caplog.messages]
        for command in ("status", "doctor", "attach"):
            shown += [
                invoke(command, str(folder)).output,
                invoke(command, str(folder), "--json").output,
            ]
        for path in ("/api/state", "/metrics", "/metrics/targets"):
            shown.append(httpx.get(f"{journal.page}{path}", trust_env=False).text)
        for path in ("/engines", "/metrics"):
            shown.append(httpx.get(f"{policy.url}{path}", trust_env=False).text)
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
        # The log of an engine is what a user sends to others.
        shown += [path.read_text(errors="replace") for path in files if path.suffix == ".log"]
        assert len(shown) > 15
    keys = [engine.access.sampling, engine.access.control]
    assert all(keys)
    assert not [text for text in shown for key in keys if key in text]
    # The key of control calls is in no file at all.
    assert not [path for path in files if keys[1] in path.read_text(errors="replace")]


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, words, env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_an_engine_that_comes_back_has_other_keys_and_no_request_meets_the_old_ones(
    tmp_path: Path,
) -> None:
    statuses: Counter[int] = Counter()
    is_over = threading.Event()

    def ask() -> None:
        with httpx.Client(trust_env=False, timeout=30) as client:
            while not is_over.is_set():
                statuses[client.post(f"{policy.url}/generate", json=BODY).status_code] += 1

    with launched(tmp_path) as deployment:
        policy = deployment["policy"]
        clients = [threading.Thread(target=ask) for _ in range(3)]
        for client in clients:
            client.start()
        seen = []
        try:
            for _ in range(2):
                before = engine_of(policy)
                seen.append(before.access)
                assert before.pid is not None
                os.kill(before.pid, signal.SIGKILL)

                def is_back(before: EngineStatus = before) -> bool:
                    now = engine_of(policy)
                    return now.state == "serving" and now.pid not in (None, before.pid)

                assert wait_until(is_back, 60)
                policy.generate([1, 2, 3]).result(30)
        finally:
            is_over.set()
            for client in clients:
                client.join(60)
        now = engine_of(policy)
        assert len({now.access.sampling, *(one.sampling for one in seen)}) == 3
        assert len({now.access.process, *(one.process for one in seen)}) == 3
        assert statuses[200] > 10
        assert statuses[401] == 0
        for old in seen:
            headers = {"Authorization": f"Bearer {old.sampling}"}
            assert post(now, "/generate", headers=headers).status_code == 401
        assert post(now, "/generate", auth=Keys(now)).status_code == 200


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.invocation])
@pytest.mark.parametrize(("setting", "value"), [("key", "mine"), ("control_key", "mine")])
def test_a_key_of_ones_own_is_for_attached_engines(
    tmp_path: Path, kind: str, setting: str, value: str
) -> None:
    with pytest.raises(ConfigError, match="each launch makes its own keys") as refused:
        config(tmp_path, {"main": {"engine": {"kind": kind, setting: value}}})
    assert value not in str(refused.value).split()


def test_a_configuration_does_not_show_its_keys(tmp_path: Path) -> None:
    attached = {"kind": "attached", "urls": ["http://a:1"], "key": "hush", "control_key": "quiet"}
    made = config(tmp_path, {"main": {"engine": attached}})
    assert not {"hush", "quiet"} & set(json.dumps(repr(made)).replace("'", " ").split())
    access = made.servers["policy"].groups["main"].engine.access
    assert access is not None
    assert (access.sampling, access.control) == ("hush", "quiet")
    one = config(tmp_path, {"main": {"engine": attached | {"control_key": ""}}})
    access = one.servers["policy"].groups["main"].engine.access
    assert access is not None
    assert access.headers(is_control=True) == access.headers(is_control=False)
    assert access.headers(is_control=True) == {"Authorization": "Bearer hush"}


def test_a_wrong_key_of_an_attached_engine_names_the_setting(tmp_path: Path) -> None:
    with launched(tmp_path / "theirs") as deployment:
        engine = engine_of(deployment["policy"])
        url = engine.endpoint.url
        keys = keys_of(engine)
        model = {"model_path": deployment.config.servers["policy"].model_path}
        for given in ({}, {"key": "wrong"}, keys | {"control_key": "wrong"}):
            attached = {"kind": "attached", "urls": [url], "start_timeout_s": 20, **given}
            groups = {"main": {"engine": attached, "needs_offload": False}}
            with pytest.raises(rollout.RolloutError, match=r"engine\.key .* engine\.control_key"):
                launch_local(config(tmp_path / f"ours-{len(given)}", groups, server=model))
        groups = {"main": {"engine": attached | keys, "needs_offload": False}}
        with launch_local(config(tmp_path / "ours", groups, server=model)) as ours:
            assert len(ours["policy"].generate([1, 2, 3]).result(30).output_ids) > 0
