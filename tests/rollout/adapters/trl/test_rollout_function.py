"""When a trainer's weights are pushed, and what is refused before anything is sent."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from engines.protocol import FinishReason, GenerateReply
from rollout.adapters.trl import RolloutFunction
from rollout.core.errors import WeightMismatch

SETTINGS = {
    "use_vllm": False,
    "max_completion_length": 8,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
}


def result(value: Any) -> Any:
    return SimpleNamespace(result=lambda: value)


class Policy:
    """Counts pushes, which change the version of its replies unless they are lost."""

    def __init__(self, *, needs_offload: bool = False, loses_pushes: bool = False) -> None:
        self.events: list[str] = []
        self.num_pushes = 0
        self._groups = [SimpleNamespace(needs_offload=needs_offload)]
        self._loses_pushes = loses_pushes

    def pusher(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(
            push=self._push,
            offload=self._offload,
            close=lambda: self.events.append("close"),
        )

    def _push(self, weights: Any) -> Any:
        self.num_pushes += 1
        self.events.append(f"push {weights}")
        return SimpleNamespace(weight_version=self.num_pushes)

    def _offload(self, *, rank_timeout_s: float) -> None:
        self.events.append(f"give memory, ranks have {rank_timeout_s:g} s")

    def generate(
        self, prompts: list[list[int]], sampling: Any, *, timeout_s: float, logprob_kind: str
    ) -> Any:
        assert logprob_kind == "full"
        self.events.append("generate")
        version = "0" if self._loses_pushes else str(self.num_pushes)
        stop = FinishReason("stop")
        return result([GenerateReply("1", "", (5,), (-0.5,), stop, weight_version=version)])

    def status(self) -> Any:
        return result(SimpleNamespace(groups=self._groups))


def trainer(**changed: Any) -> Any:
    """What is read of a ``GRPOTrainer``."""
    accelerator = SimpleNamespace(
        is_fsdp2=True,
        wait_for_everyone=lambda: None,
        unwrap_model=lambda model: model,
    )
    usual = {
        "args": SimpleNamespace(**SETTINGS),
        "tools": [],
        "environment_factories": None,
        "is_fsdp_enabled": True,
        "accelerator": accelerator,
        "model": SimpleNamespace(parameters=list, state_dict=lambda: "weights"),
        "state": SimpleNamespace(global_step=0),
        "eos_token_ids": [2],
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "_tokenize_prompts": lambda prompts: ([[1] for _ in prompts], None, {}),
    }
    return SimpleNamespace(**usual | changed)


def function_of(policy: Policy) -> RolloutFunction:
    return RolloutFunction(cast(Any, policy))


def test_weights_are_pushed_before_the_first_sample_and_after_each_step() -> None:
    policy, trl = Policy(), trainer()
    with function_of(policy) as sample:
        assert sample(["ask"], trl) == {
            "prompt_ids": [[1]],
            "completion_ids": [[5]],
            "logprobs": [[-0.5]],
        }
        sample(["ask"], trl)  # an evaluation in the same step
        trl.state.global_step = 1
        sample(["ask"], trl)
    before, after = ["push weights", "generate"], ["push weights", "generate", "close"]
    assert policy.events == [*before, "generate", *after]


def test_a_training_that_begins_again_at_the_same_step_pushes_again() -> None:
    policy, trl = Policy(), trainer()
    sample = function_of(policy)
    sample(["ask"], trl)
    trl.state = SimpleNamespace(global_step=0)
    sample(["ask"], trl)
    assert policy.num_pushes == 2


def test_engines_that_share_the_gpus_give_their_memory_and_get_the_weights_back() -> None:
    policy, trl = Policy(needs_offload=True), trainer()
    sample = RolloutFunction(cast(Any, policy), rank_timeout_s=20, request_timeout_s=40)
    sample(["ask"], trl)
    sample(["ask"], trl)
    # A rank that has its samples waits for one that may still sample.
    given = "give memory, ranks have 60 s"
    assert policy.events == ["push weights", "generate", given] * 2


def test_a_rank_with_bad_samples_gives_memory_with_the_others_before_it_raises() -> None:
    policy = Policy(needs_offload=True, loses_pushes=True)
    with pytest.raises(WeightMismatch, match="the trainer pushed version 1"):
        function_of(policy)(["ask"], trainer())
    assert policy.events[-1].startswith("give memory")


def test_a_push_that_did_not_arrive_is_an_error() -> None:
    sample = function_of(Policy(loses_pushes=True))
    with pytest.raises(WeightMismatch, match="weight version 0, but the trainer pushed version 1"):
        sample(["ask"], trainer())


def test_trl_compares_log_probs_and_its_own_sync_pushes_once() -> None:
    policy, trl = Policy(), trainer()
    sample = function_of(policy)
    sample(["ask"], trl)
    assert trl.use_vllm
    assert trl._last_loaded_step == 0
    trl.state.global_step = 1
    trl.vllm_generation.sync_weights()  # as TRL does before it calls rollout_func
    sample(["ask"], trl)
    assert policy.num_pushes == 2


def test_the_comparison_can_be_left_off() -> None:
    trl = trainer(vllm_importance_sampling_correction=False)
    function_of(Policy())(["ask"], trl)
    assert not trl.use_vllm


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"args": SimpleNamespace(**SETTINGS | {"use_vllm": True})},
            "starts vLLM besides the engines; leave it out",
        ),
        ({"tools": [print]}, "leave out tools and environment_factory"),
        ({"environment_factories": {None: dict}}, "leave out tools and environment_factory"),
        ({"accelerator": SimpleNamespace(is_fsdp2=False)}, "set fsdp_version: 2"),
        (
            {"_tokenize_prompts": lambda prompts: ([[1]], ["image"], {})},
            "prompts with images are not supported",
        ),
    ],
)
def test_what_cannot_be_sampled_is_refused(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        function_of(Policy())(["ask"], trainer(**changed))
