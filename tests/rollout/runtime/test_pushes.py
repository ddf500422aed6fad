"""A push has all that it holds in this process, and is sent once: alone, in a window, with others.

Engines are fakes that listen.  Needs torch.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from engines.fake.http_fake import HttpFakeLauncher
from rollout.config import RolloutConfig
from rollout.control.server.server import RolloutServer
from rollout.core.errors import LifecycleError, PhaseFailed, RolloutError, WeightMismatch
from rollout.observability.timeline.span import Kind
from rollout.runtime.handle import Caller, DeploymentHandle, ServerHandle
from rollout.runtime.handle.server_handle import pushes_of
from rollout.runtime.local import launch_local
from rollout.weights.push.push import Push
from tests.support.builders import write_checkpoint
from tests.support.processes import wait_until

torch = pytest.importorskip("torch")
from rollout.weights.ranks.trainer_rank import TrainerRank  # noqa: E402

pytestmark = pytest.mark.embedded
TIMEOUT_S = 30.0


def weights(value: float = 1.0) -> dict[str, Any]:
    return {
        one.name: torch.full(one.shape, value, dtype=getattr(torch, one.dtype))
        for one in DEFAULT_TENSORS
    }


@pytest.fixture
def servers() -> dict[str, Any]:
    """Settings of ``weights`` for both servers."""
    return {"transport": "shared_memory"}


@pytest.fixture
def run(tmp_path: Path, servers: dict[str, Any]) -> Iterator[DeploymentHandle]:
    (tmp_path / "shm").mkdir()
    server = {
        "model_path": write_checkpoint(tmp_path),
        "groups": {"main": {"engine": {"kind": "embedded"}}},
        "health": {"recover": False},
        "verify": {"by": "canary", "canary_prompts": [[1, 2, 3]]},
        "weights": {"shared_memory_path": str(tmp_path / "shm"), "bucket_bytes": 600, **servers},
    }
    values = {"log_dir": str(tmp_path), "servers": {"policy": server, "critic": server}}
    with launch_local(RolloutConfig.from_dict(values), launcher=HttpFakeLauncher()) as deployment:
        yield deployment


def rank_of(policy: ServerHandle) -> TrainerRank:
    rank = pushes_of(policy)._rank
    assert rank is not None
    return rank


def caller_of(policy: ServerHandle) -> Caller:
    return pushes_of(policy).server.caller


def is_free(policy: ServerHandle) -> bool:
    """Whether the next push takes the memory of those before: none of it is in use."""
    pool = rank_of(policy).pool
    num_bytes = pool.num_bytes()
    policy.phases.make_push(weights()).close()
    return 0 < num_bytes == pool.num_bytes()


def test_a_push_that_is_sent_is_freed_before_the_caller_has_the_report(
    run: DeploymentHandle,
) -> None:
    policy = run["policy"]
    made = policy.phases.make_push(weights())
    assert not made.is_closed
    assert not is_free(policy)
    assert policy.push(made).result(TIMEOUT_S).weight_version == made.version == 1
    assert made.is_closed
    assert is_free(policy)


def test_a_push_is_sent_once(run: DeploymentHandle) -> None:
    policy = run["policy"]
    with policy.phases.make_push(weights()) as made:
        policy.push(made).result(TIMEOUT_S)
        for send in (policy.push, policy.phases.update_weights, policy.checks.push_path):
            with pytest.raises(LifecycleError, match=r"version 1, closed\) was sent or closed"):
                send(made)
    with pytest.raises(RolloutError, match="belongs to the process that made it"):
        pickle.dumps(made)


def test_a_window_that_raises_frees_its_push(run: DeploymentHandle) -> None:
    policy = run["policy"]

    def train() -> None:
        with policy.offloaded() as window:
            window.push(weights())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert is_free(policy)
    policy.push(weights()).result(TIMEOUT_S)


def test_a_window_sends_a_push_that_was_made_before_it(run: DeploymentHandle) -> None:
    policy = run["policy"]
    made = policy.phases.make_push(weights(), 7)
    with policy.offloaded() as window:
        window.push(made)
    assert window.report.weight_version == 7
    assert made.is_closed
    assert is_free(policy)


def test_a_transaction_frees_all_its_pushes_also_with_expected_log_probs(
    run: DeploymentHandle,
) -> None:
    policy, critic = run["policy"], run["critic"]
    prompts = policy.checks.canary_prompts
    policy.checks.expect([[-1.0] * (len(prompt) - 1) for prompt in prompts])
    made = policy.phases.make_push(weights(2.0))
    # The fakes have other log-probs, so the call fails: the pushes end all the same.
    with pytest.raises(PhaseFailed, match="log-prob"):
        run.push({"policy": made, "critic": weights(3.0)}).result(TIMEOUT_S)
    assert made.is_closed
    assert is_free(policy)
    assert is_free(critic)


@pytest.mark.parametrize("servers", [{"transport": "shared_memory", "stream": True}])
@pytest.mark.parametrize("how", ["streamed", "window", "transaction", "all ranks"])
def test_each_way_to_drive_a_push_has_the_same_figures(run: DeploymentHandle, how: str) -> None:
    policy, tensors = run["policy"], weights()
    if how == "all ranks":
        with policy.pusher() as pusher:
            report = pusher.push(tensors)
    elif how == "window":
        with policy.offloaded() as window:
            window.push(tensors)
        report = window.report
    elif how == "transaction":
        report = run.push({"policy": tensors}).result(TIMEOUT_S)["policy"]
    else:
        report = policy.push(tensors).result(TIMEOUT_S)
    assert report.weight_version == 1
    num_bytes = sum(one.nbytes for one in tensors.values())
    shown = [(one.rank, one.stage, one.route, one.num_bytes) for one in report.push_stages]
    assert shown == [
        (0, "gather", "", num_bytes),
        (0, "copy", "shared_memory", num_bytes),
        (0, "engine", "shared_memory", num_bytes),
    ]
    assert all(one.elapsed_s > 0 for one in report.push_stages)

    def recorded() -> list[tuple[str, int, int | None, str]]:
        observed = caller_of(policy).call(RolloutServer.observe, {}).result(TIMEOUT_S)
        spans = [span for one in observed.timelines.values() for span in one.spans]
        return [
            (span.name, span.num_bytes, span.weight_version, span.route)
            for span in spans
            if span.kind is Kind.RANK
        ]

    assert wait_until(lambda: bool(recorded()), 10)
    for stage in ("gather", "copy", "engine"):
        assert sum(size for name, size, *_ in recorded() if name == stage) == num_bytes
    assert {one[2] for one in recorded()} == {1}
    assert {one[3] for one in recorded()} == {"", "shared_memory"}


def test_a_push_that_fails_has_no_figures_on_the_timeline(run: DeploymentHandle) -> None:
    policy = run["policy"]
    policy.checks.expect([[-1.0] * (len(one) - 1) for one in policy.checks.canary_prompts])
    with pytest.raises(PhaseFailed, match="log-prob"):
        policy.push(weights()).result(TIMEOUT_S)
    observed = caller_of(policy).call(RolloutServer.observe, {}).result(TIMEOUT_S)
    spans = [span for one in observed.timelines.values() for span in one.spans]
    assert not [span for span in spans if span.kind is Kind.RANK]


def test_a_transaction_of_which_one_push_does_not_fit_frees_the_others(
    run: DeploymentHandle,
) -> None:
    policy = run["policy"]
    with pytest.raises(WeightMismatch):
        run.push({"policy": weights(), "critic": {"other": torch.ones(1)}})
    assert is_free(policy)
    assert policy.status().result(TIMEOUT_S).phase == "serving"
    closed = policy.phases.make_push(weights())
    closed.close()
    with pytest.raises(LifecycleError, match="make another"):
        run.push({"critic": weights(), "policy": closed})
    assert is_free(run["critic"])


@pytest.mark.parametrize("servers", [{"transport": "shared_memory", "stream": True}])
def test_a_transaction_streams_its_pushes(
    run: DeploymentHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[object] = []
    send = Push.__init__

    def noted(push: Push, *args: Any, **kwargs: Any) -> None:
        send(push, *args, **kwargs)
        streams.append(push.weights.stream)

    monkeypatch.setattr(Push, "__init__", noted)
    run.offload().result(TIMEOUT_S)
    both = {name: weights(4.0) for name in run}
    reports = run.push(both).result(TIMEOUT_S)
    assert {name: report.weight_version for name, report in reports.items()} == {
        "policy": 1,
        "critic": 1,
    }
    assert len(streams) == 2
    assert all(streams)
    assert not [one for one in threading.enumerate() if one.name.startswith("push-stream")]


def test_the_first_pushes_of_two_threads_share_one_rank_and_its_memory(
    run: DeploymentHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_at_once, made = threading.Barrier(2), list[TrainerRank]()

    def make_slowly(*args: Any, **kwargs: Any) -> TrainerRank:
        with suppress(threading.BrokenBarrierError):
            two_at_once.wait(0.3)
        made.append(TrainerRank(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("rollout.weights.ranks.trainer_rank.TrainerRank", make_slowly)
    policy = run["policy"]
    with ThreadPoolExecutor(2) as threads:
        pushes = [threads.submit(policy.phases.make_push, weights(n)) for n in (1.0, 2.0)]
        for push in pushes:
            push.result().close()
    assert made == [rank_of(policy)]
