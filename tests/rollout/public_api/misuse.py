"""One wrong call of each function, class and method of the public API, and its error."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import rollout
from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from rollout.adapters.trl import RolloutFunction, RolloutWorker, WeightTransfer
from rollout.core.errors import (
    ConfigError,
    GenerationFailed,
    LifecycleError,
    RolloutError,
    WeightMismatch,
)
from rollout.core.pending import LoopThread, Pending
from rollout.core.samples import EngineSpan, all_samples, version_number
from rollout.driver import (
    EvalPlan,
    Replay,
    RetryPolicy,
    drop_zero_std,
    load_groups,
    packed,
    padded,
    rewards,
    save_groups,
    train_data,
)
from rollout.driver.client.agent_session import AgentSession
from rollout.driver.logprobs.token_logprobs import token_logprobs
from rollout.runtime.handle import DeploymentHandle, ServerHandle
from tests.support.builders import push
from tests.support.served_fakes import TIMEOUT_S

NOWHERE = "http://127.0.0.1:1"
PROMPT = rollout.Prompt((1, 2))
SAMPLING = rollout.SamplingParams()
SAMPLE = rollout.Sample([1], [2], [-1.0])
GROUP = rollout.SampleGroup(0, [SAMPLE])
WEIGHTS = {one.name: torch.ones(one.shape) for one in DEFAULT_TENSORS}
BATCH = {"num_groups": 1, "group_size": 1, "sampling": SAMPLING}
CLOSED = "deployment is closed: no call is possible after stop or close"
DRIVER_CLOSED = "driver is closed: no call is possible"
Wrong = Callable[[Any], Any]


class On(NamedTuple):
    """What a wrong call is made on: a run that serves, and one that has been stopped."""

    deployment: DeploymentHandle
    closed: DeploymentHandle
    folder: Path

    @property
    def policy(self) -> ServerHandle:
        return self.deployment["policy"]

    @property
    def gone(self) -> ServerHandle:
        return self.closed["policy"]


class Case(NamedTuple):
    """A wrong call, and the class and words of its error, a regular expression."""

    call: Wrong
    error: type[Exception]
    words: str


def ended(call: Callable[[On], Pending[Any]]) -> Wrong:
    """The call until it has ended."""
    return lambda on: call(on).result(TIMEOUT_S)


def run(call: Callable[[On], Coroutine[Any, Any, Any]]) -> Wrong:
    """The call on an event loop."""
    return lambda on: asyncio.run(call(on))


def of_driver(use: Callable[[rollout.Driver], Any], *, is_closed: bool = False) -> Wrong:
    """A wrong use of a driver without engines."""

    def call(on: On) -> None:
        with rollout.Driver(NOWHERE) as driver:
            if is_closed:
                driver.close()
            found = use(driver)
            if isinstance(found, Pending):
                found.result(TIMEOUT_S)

    return call


def of_async_driver(
    use: Callable[[rollout.RolloutDriver], Any], *, is_closed: bool = False
) -> Wrong:
    """The same of one with coroutines."""

    async def call() -> None:
        async with rollout.RolloutDriver(NOWHERE) as driver:
            if is_closed:
                await driver.close()
            found = use(driver)
            if asyncio.iscoroutine(found):
                await found

    return lambda on: asyncio.run(call())


def of_pusher(use: Callable[[Any], Any], *, is_closed: bool = False) -> Wrong:
    def call(on: On) -> None:
        with on.policy.pusher() as pusher:
            if is_closed:
                pusher.close()
            use(pusher)

    return call


def of_pending(use: Callable[[Pending[Any]], Any]) -> Wrong:
    """A wrong use of a call that does not end by itself."""

    def call(on: On) -> None:
        loop = LoopThread("test")
        pending = loop.submit(asyncio.sleep(600))
        try:
            use(pending)
        finally:
            pending.cancel()
            loop.close()

    return call


def of_session(use: Callable[[rollout.Session], Any]) -> Wrong:
    async def complete(*_: Any, **__: Any) -> None: ...

    def call(on: On) -> None:
        found = use(rollout.Session(rollout.Sample([1]), SAMPLING, complete))
        if asyncio.iscoroutine(found):
            asyncio.run(found)

    return call


def of_closed_session(use: Callable[[Any], Any]) -> Wrong:
    def call(on: On) -> None:
        session = on.policy.session("mine")
        session.close().result(TIMEOUT_S)
        use(session)

    return call


def report() -> rollout.LogprobReport:
    """Of a sample whose log-probs are not the trainer's."""
    return rollout.compare_logprobs([SAMPLE], [[-3.0]])


def worker(**changed: Any) -> RolloutWorker:
    args = SimpleNamespace(
        queue_maxsize=1,
        max_inflight_tasks=1,
        max_completion_length=8,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
    )
    given = {
        "policy": SimpleNamespace(generate=None, weight_version=0),
        "dataset": [],
        "reward_funcs": len,
        "processing_class": None,
        "args": args,
    }
    return RolloutWorker(**given | changed)


def started_twice(on: On) -> None:
    one = worker()
    one._thread = SimpleNamespace()  # type: ignore[assignment]
    one.start()


def transfer_of(on: On) -> WeightTransfer:
    return WeightTransfer(on.policy)


def twice_prepared(on: On) -> None:
    transfer = transfer_of(on)
    transfer.init_weight_transfer()
    try:
        transfer.init_weight_transfer()
    finally:
        transfer.destroy()


def closed_function(on: On) -> RolloutFunction:
    function = RolloutFunction(on.policy)
    function.close()
    return function


def lora_push(on: On) -> Any:
    return on.policy.phases.make_push({}, adapter={})


def closed_push(on: On) -> Any:
    with on.policy.phases.make_push(WEIGHTS) as made:
        pass
    return on.policy.serve_weights(made)


LAUNCH = {
    "launch": Case(lambda on: rollout.launch({}), ConfigError, "takes a RolloutConfig, not a dict"),
    "connect": Case(
        lambda on: rollout.connect(""), ConfigError, "run = '': must be the run's folder"
    ),
    "RolloutConfig": Case(
        lambda on: rollout.RolloutConfig(servers={}, nope=3), ValueError, "nope\n.*not permitted"
    ),
    "RolloutConfig.from_dict": Case(
        lambda on: rollout.RolloutConfig.from_dict("x"), ConfigError, "this one is a str"
    ),
    "RolloutConfig.from_file": Case(
        lambda on: rollout.RolloutConfig.from_file(3), ConfigError, "is a str or Path, not 3"
    ),
    "RolloutConfig.examined_file": Case(
        lambda on: rollout.RolloutConfig.examined_file(Path("absent.yaml")),
        ConfigError,
        "cannot read config absent.yaml",
    ),
    "ConfigError.of": Case(lambda on: ConfigError.of([]), ValueError, "needs at least one mistake"),
}

DEPLOYMENT = {
    "DeploymentHandle.__getitem__": Case(
        lambda on: on.deployment["polcy"], KeyError, "no server 'polcy'; this run has policy"
    ),
    "RunHandle.__getitem__": Case(
        lambda on: rollout.RunHandle({})["a"], KeyError, "no server 'a'; this run has no server"
    ),
    "DeploymentHandle.started": Case(
        lambda on: on.deployment.started(), LifecycleError, "was started by launch"
    ),
    "DeploymentHandle.give_memory": Case(lambda on: on.closed.give_memory(), RolloutError, CLOSED),
    "DeploymentHandle.serve_weights": Case(
        lambda on: on.deployment.serve_weights({"polcy": {}}),
        ConfigError,
        "no server 'polcy' to push weights to; known: policy",
    ),
    "DeploymentHandle.serve": Case(
        lambda on: on.deployment.serve(before_kv=5), ConfigError, "before_kv takes a plain function"
    ),
    "DeploymentHandle.status": Case(lambda on: on.closed.status(), RolloutError, CLOSED),
}

NOT_TENSORS = "takes tensors by name, such as model.state_dict.., not the int 5"
SERVER = {
    "ServerHandle.url": Case(
        lambda on: ServerHandle("policy", on.gone._config, on.gone._caller).url,
        RolloutError,
        CLOSED,
    ),
    "ServerHandle.weight_version": Case(lambda on: on.gone.weight_version, RolloutError, CLOSED),
    "ServerHandle.status": Case(lambda on: on.gone.status(), RolloutError, CLOSED),
    "ServerHandle.give_memory": Case(lambda on: on.gone.give_memory(), RolloutError, CLOSED),
    "PhaseCommands.pause_generation": Case(
        lambda on: on.gone.phases.pause_generation(), RolloutError, CLOSED
    ),
    "PhaseCommands.verify": Case(lambda on: on.gone.phases.verify(), RolloutError, CLOSED),
    "PhaseCommands.continue_generation": Case(
        lambda on: on.gone.phases.continue_generation(), RolloutError, CLOSED
    ),
    "PhaseCommands.flush_cache": Case(
        ended(lambda on: on.policy.phases.flush_cache()),
        LifecycleError,
        "cannot flush while serving",
    ),
    "PhaseCommands.release_memory_occupation": Case(
        ended(lambda on: on.policy.phases.release_memory_occupation()),
        LifecycleError,
        "cannot release while serving; legal now: pause",
    ),
    "PhaseCommands.onload_weights": Case(
        ended(lambda on: on.policy.phases.onload_weights()),
        LifecycleError,
        "cannot resume_weights while",
    ),
    "PhaseCommands.onload_kv": Case(
        ended(lambda on: on.policy.phases.onload_kv()),
        LifecycleError,
        "cannot resume_kv while serving",
    ),
    "PhaseCommands.update_weights": Case(
        ended(lambda on: on.policy.phases.update_weights(push(9))),
        LifecycleError,
        "cannot update_weights while serving",
    ),
    "WeightChecks.expect": Case(
        lambda on: on.policy.checks.expect(5), WeightMismatch, "a list of floats per prompt"
    ),
    "ServerHandle.serve_weights": Case(
        lambda on: on.policy.serve_weights(5), WeightMismatch, NOT_TENSORS
    ),
    "WeightChecks.push_path": Case(
        lambda on: on.policy.checks.push_path(5), WeightMismatch, NOT_TENSORS
    ),
    "WeightChecks.base_differs": Case(
        lambda on: on.policy.checks.base_differs(5), WeightMismatch, NOT_TENSORS
    ),
    "PhaseCommands.make_push": Case(
        lora_push, WeightMismatch, "weights.update is full: adapters need lora"
    ),
    "Push.send": Case(closed_push, LifecycleError, r"Push\(version 1, closed\) was sent or closed"),
    "ServerHandle.serve": Case(
        lambda on: on.policy.serve(before_kv=5), ConfigError, "before_kv takes a plain function"
    ),
    "ServerHandle.offloaded": Case(
        lambda on: on.policy.offloaded({}),
        ConfigError,
        "a function that returns tensors, not a dict",
    ),
    "ServerEngines.remove": Case(
        ended(lambda on: on.policy.engines.remove("x")),
        LifecycleError,
        "no engine x to remove; known: main-0",
    ),
    "ServerEngines.add": Case(
        ended(lambda on: on.policy.engines.add("x")),
        LifecycleError,
        "no vacant slot x; vacant: none",
    ),
    "ServerHandle.generate": Case(
        lambda on: on.policy.generate([1], nope=3),
        ConfigError,
        "nope is no option of a request; known: image_data, ",
    ),
    "SampleOptions": Case(
        lambda on: on.policy.generate([1], timeout_s=0), ConfigError, "timeout_s = 0: must be more"
    ),
    "SamplingParams": Case(
        lambda on: on.policy.generate([1], rollout.SamplingParams(temperature="hot")),
        ConfigError,
        "temperature = 'hot': must be a number",
    ),
    "ServerHandle.stream": Case(
        lambda on: on.policy.stream([[1], [2]]), ConfigError, "stream takes one prompt"
    ),
    "ServerHandle.session": Case(
        lambda on: on.policy.session("a b"), ConfigError, "session_id = 'a b': must be 1 to 256"
    ),
    "ServerHandle.abort": Case(
        lambda on: on.policy.abort(""), ConfigError, "request_id = '': must be a text"
    ),
    "ServerHandle.pusher": Case(
        lambda on: on.policy.pusher(rank_timeout_s=0), ConfigError, "rank_timeout_s = 0: must be"
    ),
    "AgentSession.turns": Case(
        of_closed_session(lambda session: session.turns()), RolloutError, "session mine is closed"
    ),
    "AgentSession.samples": Case(
        of_closed_session(lambda session: session.samples()),
        RolloutError,
        "session mine is closed, and its turns are deleted",
    ),
    "AgentSession.close": Case(
        lambda on: AgentSession(NOWHERE, "a", key="", control_key="", submit=asyncio.run).close(),
        GenerationFailed,
        f"DELETE {NOWHERE}/sessions/a: ClientConnectorError",
    ),
}

WINDOW = {
    "OffloadWindow.push": Case(
        lambda on: on.policy.offloaded().push(WEIGHTS), LifecycleError, "window is not open"
    ),
    "Pusher.push": Case(
        of_pusher(lambda pusher: pusher.push(WEIGHTS, dtype="bfloat16")),
        ConfigError,
        "dtype = 'bfloat16': must be a torch.dtype",
    ),
    "Pusher.check_push_path": Case(
        of_pusher(lambda pusher: pusher.check_push_path(WEIGHTS, name_map=5)),
        WeightMismatch,
        "name_map is a function, not a int",
    ),
    "Pusher.give_memory": Case(
        of_pusher(lambda pusher: pusher.give_memory(), is_closed=True),
        RolloutError,
        "this pusher is closed; policy.pusher.. makes another",
    ),
}

PENDING = {
    "Pending.result": Case(
        of_pending(lambda pending: pending.result(-1)), ConfigError, "timeout_s = -1: must be"
    ),
    "Pending.then": Case(
        of_pending(lambda pending: pending.then(5)), ConfigError, "act = 5: must be a function"
    ),
    "Pending.object_ref": Case(
        of_pending(lambda pending: pending.object_ref), RolloutError, "has no object_ref"
    ),
}

DRIVER = {
    "Driver": Case(lambda on: rollout.Driver("localhost:80"), ConfigError, "url = 'localhost:80'"),
    "Driver.rollout": Case(
        of_driver(lambda one: one.rollout(1, [], group_size=1, sampling=SAMPLING)),
        ConfigError,
        "at least one prompt",
    ),
    "Driver.evaluate": Case(
        of_driver(lambda one: one.evaluate(1, [])), ConfigError, "datasets = .*: must be a mapping"
    ),
    "Driver.check_logprobs": Case(
        of_driver(lambda one: one.check_logprobs([], [], on_mismatch="x")),
        ConfigError,
        "on_mismatch = 'x': must be 'warn' or 'raise'",
    ),
    "Driver.set_weight_version": Case(
        of_driver(lambda one: one.set_weight_version("7")),
        ConfigError,
        "version = '7': must be a whole number",
    ),
    "Driver.state_of": Case(
        of_driver(lambda one: one.state_of(PROMPT), is_closed=True), RolloutError, DRIVER_CLOSED
    ),
    "Driver.restore": Case(
        of_driver(lambda one: one.restore(rollout.PromptData([{"prompt_ids": [1]}]), {}, **BATCH)),
        ConfigError,
        "no state of a stream: it has no audit, next_serial, source, works",
    ),
    "RolloutDriver": Case(
        lambda on: rollout.RolloutDriver(NOWHERE), RolloutError, "needs a running event loop"
    ),
    "RolloutDriver.rollout": Case(
        of_async_driver(
            lambda one: one.rollout(1, [PROMPT], group_size=1, sampling=SAMPLING), is_closed=True
        ),
        RolloutError,
        DRIVER_CLOSED,
    ),
    "RolloutDriver.evaluate": Case(
        of_async_driver(lambda one: one.evaluate(1, {}), is_closed=True),
        RolloutError,
        DRIVER_CLOSED,
    ),
    "RolloutDriver.check_logprobs": Case(
        of_async_driver(lambda one: one.check_logprobs([], []), is_closed=True),
        RolloutError,
        DRIVER_CLOSED,
    ),
    "RolloutDriver.set_weight_version": Case(
        of_async_driver(lambda one: one.set_weight_version(-1)),
        ConfigError,
        "version = -1: must be at least 0",
    ),
    "RolloutDriver.state_of": Case(
        of_async_driver(lambda one: one.state_of(PROMPT)), ConfigError, "nothing was rolled out"
    ),
    "RolloutDriver.stream_of": Case(
        of_async_driver(lambda one: one.stream_of(PROMPT)), ConfigError, "nothing was rolled out"
    ),
    "RolloutDriver.restore": Case(
        of_async_driver(lambda one: one.restore(5, {}, **BATCH)),
        ConfigError,
        "source = 5: must be a source such as PromptData",
    ),
    "Prompt": Case(
        lambda on: rollout.Prompt("a"), ConfigError, "ids = 'a': must be a tuple or list"
    ),
    "RolloutOptions": Case(
        lambda on: rollout.RolloutOptions(partial=1), ConfigError, "partial = 1: must be True or"
    ),
    "Hooks": Case(
        lambda on: rollout.Hooks(reward=1), ConfigError, "reward = 1: must be a function"
    ),
    "RetryPolicy": Case(lambda on: RetryPolicy(max_lost=-1), ConfigError, "max_lost = -1: must be"),
    "EvalDataset": Case(
        lambda on: rollout.EvalDataset([PROMPT], ks=("a",)), ConfigError, r"ks\[0\] = 'a': must be"
    ),
    "EvalPlan": Case(lambda on: EvalPlan(every=1.5), ConfigError, "every = 1.5: must be a whole"),
    "EvalPlan.is_due": Case(lambda on: EvalPlan(2).is_due("x"), ConfigError, "num_trained = 'x'"),
    "Session.generate": Case(
        of_session(lambda one: one.generate(5)), ConfigError, "sampling = 5: must be SamplingParams"
    ),
    "Session.observe": Case(
        of_session(lambda one: one.observe("text")), ConfigError, "ids = 'text': .*not allowed"
    ),
}

# Of a wrong kind where Python says so at once.
NOT_INT = "'int' object has no attribute"
DATA = {
    "PromptData": Case(lambda on: rollout.PromptData([]), ConfigError, "the data set has no rows"),
    "PromptData.take": Case(
        lambda on: rollout.PromptData(["x"]).take(), ConfigError, "row 0 is str, not a mapping"
    ),
    "PromptData.name": Case(
        lambda on: rollout.PromptData([{"image": object()}]).name, ConfigError, r"PromptData\(name="
    ),
    "PromptData.load_state_dict": Case(
        lambda on: rollout.PromptData([{"prompt_ids": [1]}]).load_state_dict({"seed": 0}),
        ConfigError,
        "no state of a PromptData: it has no epoch, num_rows, place",
    ),
    "load_groups": Case(
        lambda on: load_groups(on.folder / "none"), ConfigError, "no such dump: .*/none"
    ),
    "save_groups": Case(
        lambda on: save_groups(on.folder / "no" / "file", 1, [GROUP]), ConfigError, "cannot write "
    ),
    "Replay": Case(lambda on: Replay(on.folder), ConfigError, "has no .*parquet file"),
    "Replay.rollout": Case(
        lambda on: Replay().rollout(1), RolloutError, "no rollout 1 in the dumps; there are none"
    ),
    "packed": Case(lambda on: packed([]), ValueError, "no samples to make a batch of"),
    "padded": Case(
        lambda on: padded([GROUP], pad_to_multiple=0), ConfigError, "pad_to_multiple = 0: must be"
    ),
    "train_data": Case(lambda on: train_data(5), TypeError, "'int' object is not iterable"),
    "drop_zero_std": Case(lambda on: drop_zero_std(5), AttributeError, NOT_INT),
    "all_samples": Case(lambda on: all_samples(5), TypeError, "'int' object is not iterable"),
    "version_number": Case(lambda on: version_number(5), AttributeError, NOT_INT),
    "Sample": Case(lambda on: rollout.Sample([1], [2]), ValueError, "1 output ids but 0 log-probs"),
    "Sample.check": Case(
        lambda on: rollout.Sample([1], [2], [-1.0], engines=(EngineSpan("a", 0, 5),)),
        ValueError,
        "engine span 0..5 of 'a' does not fit after token 0 of 1",
    ),
    "StepReport.merged": Case(lambda on: rollout.StepReport().merged(5), AttributeError, NOT_INT),
}

LOGPROBS = {
    "compare_logprobs": Case(
        lambda on: rollout.compare_logprobs([SAMPLE], [["x"]]),
        ConfigError,
        r"trainer_logprobs\[0\] is not a row of numbers: .*'x'",
    ),
    "token_logprobs": Case(
        lambda on: token_logprobs(torch.ones(2, 5), torch.tensor([1, 2, 3])),
        ConfigError,
        r"token_ids.shape = \[3\]: must be \[2\]",
    ),
    "LogprobReport.truncated_weights": Case(
        lambda on: report().truncated_weights(0), ConfigError, "cap = 0: must be more than 0"
    ),
    "LogprobReport.raise_mismatch": Case(
        lambda on: report().raise_mismatch(), rollout.LogprobMismatch, "nats"
    ),
}

NO_ANSWER = "metadata has no 'answer'; it has nothing"
REWARDS = {
    "exact_match": Case(lambda on: rewards.exact_match()(SAMPLE), KeyError, NO_ANSWER),
    "multiple_choice": Case(lambda on: rewards.multiple_choice()(SAMPLE), KeyError, NO_ANSWER),
    "rewards.math": Case(lambda on: rewards.math()(SAMPLE), KeyError, NO_ANSWER),
    "in_thread": Case(lambda on: rewards.in_thread(5), ConfigError, "reward = 5: must be a plain"),
    "RemoteReward": Case(
        lambda on: rewards.RemoteReward("host"), ConfigError, "url = 'host': must be an http"
    ),
    "RemoteReward.__call__": Case(
        run(lambda on: rewards.RemoteReward(NOWHERE)(5)),
        AttributeError,
        NOT_INT,
    ),
}

TRL = {
    "RolloutFunction": Case(
        lambda on: RolloutFunction("policy"), ConfigError, "policy = 'policy': must be the handle"
    ),
    "RolloutFunction.__call__": Case(
        lambda on: RolloutFunction(on.policy)(["a"], 5), ConfigError, "trainer = 5: must be a GRPO"
    ),
    "RolloutFunction.sync_weights": Case(
        lambda on: closed_function(on).sync_weights(5), RolloutError, "RolloutFunction is closed"
    ),
    "RolloutWorker": Case(
        lambda on: worker(reward_funcs=[5]),
        ConfigError,
        r"reward_funcs\[0\] = 5: must be a function",
    ),
    "RolloutWorker.start": Case(started_twice, LifecycleError, "worker has been started"),
    "RolloutWorker.update_model_version": Case(
        lambda on: worker().update_model_version("x"), ConfigError, "model_version = 'x'"
    ),
    "RolloutWorker.check_health": Case(
        lambda on: worker().check_health(0), ConfigError, "stale_after_s = 0: must be more than 0"
    ),
    "WeightTransfer": Case(lambda on: WeightTransfer(5), ConfigError, "policy = 5: must be the"),
    "WeightTransfer.init_weight_transfer": Case(
        twice_prepared, LifecycleError, "was called before; call destroy first"
    ),
    "WeightTransfer.send_weights": Case(
        lambda on: transfer_of(on).send_weights(iter([])), LifecycleError, "before init_weight_tran"
    ),
    "WeightTransfer.pause": Case(lambda on: WeightTransfer(on.gone).pause(), RolloutError, CLOSED),
    "WeightTransfer.resume": Case(
        lambda on: WeightTransfer(on.gone).resume(), RolloutError, CLOSED
    ),
}

MISUSE: dict[str, Case] = functools.reduce(
    lambda all_, one: all_ | one,
    [LAUNCH, DEPLOYMENT, SERVER, WINDOW, PENDING, DRIVER, DATA, LOGPROBS, REWARDS, TRL],
)
