"""Every function, class and method of the public API has a wrong call, and its error is clear."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from rollout.core.errors import RolloutError
from rollout.driver.client import http_client
from rollout.runtime.local import launch_local
from tests.support.public_names import parameters, public_calls
from tests.support.served_fakes import TIMEOUT_S, launched

pytest.importorskip("torch")
from tests.rollout.public_api.misuse import MISUSE, Case, On

pytestmark = pytest.mark.embedded
CALLS = public_calls()
# What cannot be called wrongly, by the reason.  None of it has a parameter.
SAFE_FOR = {
    "only the library makes it, and its fields are only read": """
        AgentSession DeploymentHandle EngineRank EngineReport EngineSlot EngineSpan EngineStatus
        EvalResult GapFigures GenerateReply GroupStatus LogprobReport Mismatch Mistake NodeShare
        OffloadWindow Pending PhaseCommands PhaseReport Push PushStage Pusher ReplyStream RunHandle
        ServerEngines ServerHandle ServerStatus Session StepReport StoreStatus TrainerSlot
        WeightChecks
    """,
    "it may be called at any time, and again": """
        Driver.close DeploymentHandle.stop Pending.cancel Push.close Pusher.close RemoteReward.close
        ReplyStream.close RolloutDriver.close RolloutFunction.close RolloutWorker.stop
        ServerHandle.close WeightTransfer.destroy
    """,
    "it takes nothing, and needs no phase and no connection": """
        DeploymentHandle.placement_group DeploymentHandle.ready DeploymentHandle.trainer_slots
        EngineSlot.num_gpus EngineSlot.shares EngineSlot.standby_name EngineStatus.process
        EvalResult.line LogprobReport.metrics Pending.done
        PhaseReport.failures PhaseReport.freed_bytes PromptData.epoch PromptData.state_dict
        Push.is_closed Push.version PushStage.gib_per_s Replay.rollout_ids RolloutConfig.conflicts
        RolloutDriver.weight_version RolloutDriver.why_waiting
        Sample.is_unfinished Sample.mask Sample.versions
        SampleGroup.has_zero_std SampleGroup.rewards SamplingParams.can_continue
        SamplingParams.to_wire Session.num_left WeightChecks.canary_prompts
    """,
}
SAFE = {name: reason for reason, names in SAFE_FOR.items() for name in names.split()}
RAISES_NOTHING = {
    "RolloutConfig.examined": "it returns what is wrong instead of raising",
    "Sample.fail": "it keeps what it is given",
    "SampleGroup": "it keeps what it is given",
}


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[On]:
    folder = tmp_path_factory.mktemp("misuse")
    with launched(launch_local, folder / "closed", {"main": {}}) as closed:
        pass
    with launched(launch_local, folder / "open", {"main": {}}) as deployment:
        yield On(deployment, closed, folder)


@pytest.mark.parametrize("name", MISUSE)
def test_a_wrong_call_has_a_clear_error(name: str, on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_RECONNECT_S", 0.1)
    case: Case = MISUSE[name]
    with pytest.raises(case.error, match=case.words) as raised:
        case.call(on)
    of_python = KeyError | TypeError | AttributeError
    assert isinstance(raised.value, RolloutError | ValueError | of_python)
    assert on.policy.status().result(TIMEOUT_S).phase == "serving"


def test_every_call_of_the_public_api_is_in_a_table() -> None:
    assert sorted(CALLS.keys() - MISUSE.keys() - SAFE.keys() - RAISES_NOTHING.keys()) == []


def test_the_tables_have_nothing_else_and_nothing_twice() -> None:
    named = [*MISUSE, *SAFE, *RAISES_NOTHING]
    assert sorted(set(named) - CALLS.keys()) == []
    assert len(named) == len(set(named))


def test_what_cannot_be_called_wrongly_takes_nothing() -> None:
    taking = [name for name in SAFE if not inspect.isclass(CALLS[name]) and parameters(CALLS[name])]
    assert taking == []
