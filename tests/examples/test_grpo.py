from dataclasses import dataclass, replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from arithmetic import EOS_ID, encode, make_warm_started_model
from grpo import GrpoConfig, GrpoTrainer, group_advantages, make_batch, token_logprobs

pytestmark = pytest.mark.embedded


@dataclass
class Graded:
    prompt_ids: list[int]
    output_ids: list[int]
    output_logprobs: list[float]
    reward: float | None


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_warm_started_model(path, seed=0, num_steps=1, batch_size=8)
    return path


def forward_logprobs(trainer: GrpoTrainer, prompt: list[int], output: list[int]) -> list[float]:
    """Log-probs of ``output``, one forward pass for each of its tokens."""
    logprobs = []
    for end in range(len(output)):
        with torch.no_grad():
            logits = trainer.model(input_ids=torch.tensor([prompt + output[:end]])).logits[0, -1]
        logprobs.append(float(logits.log_softmax(-1)[output[end]]))
    return logprobs


def graded(trainer: GrpoTrainer, prompt: str, output: str, reward: float | None) -> Graded:
    prompt_ids, output_ids = encode(prompt), [*encode(output), EOS_ID]
    return Graded(prompt_ids, output_ids, forward_logprobs(trainer, prompt_ids, output_ids), reward)


def loss_of(trainer: GrpoTrainer, groups: list[list[Graded]], pad_to: int = 0) -> float:
    batch = make_batch(groups, pad_to)
    with torch.no_grad():
        return float(trainer.loss(batch, token_logprobs(trainer.model, batch.token_ids)))


def test_advantages_of_a_group_have_mean_zero_and_deviation_one() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx(
        [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], abs=1e-5
    )


@pytest.mark.parametrize("rewards", [[0.0] * 4, [1.0] * 4, [0.1] * 3])
def test_equal_rewards_give_no_advantage(rewards: list[float]) -> None:
    assert group_advantages(rewards) == pytest.approx([0.0] * len(rewards), abs=1e-9)


def test_trainer_and_token_by_token_forward_agree_on_padded_samples(model_path: Path) -> None:
    trainer = GrpoTrainer(model_path)
    samples = [graded(trainer, "37+45=", "82", 1.0), graded(trainer, "67+45=", "112", 0.0)]
    batch = make_batch([samples], pad_to=20)
    with torch.no_grad():
        logprobs = token_logprobs(trainer.model, batch.token_ids)
    torch.testing.assert_close(logprobs * batch.mask, batch.behaviour_logprobs)
    assert batch.mask.sum() == 3 + 4


def test_padding_does_not_change_the_loss(model_path: Path) -> None:
    trainer = GrpoTrainer(model_path)
    group = [graded(trainer, "37+45=", "82", 1.0), graded(trainer, "37+45=", "121", 0.0)]
    group[0].output_logprobs[0] += 0.1
    padded, bare = loss_of(trainer, [group], pad_to=40), loss_of(trainer, [group])
    assert padded == pytest.approx(bare, rel=1e-4)


def test_a_step_makes_rewarded_tokens_likelier_and_the_others_less_likely(
    model_path: Path,
) -> None:
    trainer = GrpoTrainer(model_path, GrpoConfig(num_minibatches=1))
    good, bad = graded(trainer, "37+45=", "82", 1.0), graded(trainer, "37+45=", "72", 0.0)
    metrics = trainer.step([[good, bad]])
    assert metrics["reward"] == 0.5
    assert metrics["logprob_gap"] < 1e-5
    for sample, sign in ((good, 1), (bad, -1)):
        after = forward_logprobs(trainer, sample.prompt_ids, sample.output_ids)
        # The first token is where the two part ways.
        assert sign * (after[0] - sample.output_logprobs[0]) > 0


def test_a_step_on_equal_rewards_leaves_the_weights_alone(model_path: Path) -> None:
    trainer = GrpoTrainer(model_path)
    before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    trainer.step([[graded(trainer, "37+45=", output, 1.0) for output in ("82", "82", "72")]])
    assert all(torch.equal(before[name], now) for name, now in trainer.state_dict().items())


@pytest.mark.parametrize(
    ("log_ratio", "reward", "is_stopped"),
    [(0.5, 1.0, True), (-0.5, 1.0, False), (0.5, 0.0, False), (-0.5, 0.0, True)],
)
def test_the_clip_stops_a_token_that_has_already_moved_its_way(
    model_path: Path, log_ratio: float, reward: float, is_stopped: bool
) -> None:
    trainer = GrpoTrainer(model_path)
    sample = graded(trainer, "37+45=", "82", reward)
    sample.output_logprobs = [value - log_ratio for value in sample.output_logprobs]
    batch = make_batch([[sample, replace(sample, reward=1 - reward)]])
    batch.advantages[1] = 0.0
    trainer.loss(batch, token_logprobs(trainer.model, batch.token_ids)).backward()
    gradient = trainer.model.lm_head.weight.grad
    assert (float(gradient.abs().max()) == 0.0) is is_stopped


def test_samples_without_reward_or_output_are_left_out(model_path: Path) -> None:
    trainer = GrpoTrainer(model_path)
    good, bad = graded(trainer, "37+45=", "82", 1.0), graded(trainer, "37+45=", "72", 0.0)
    failed, ungraded = Graded(encode("37+45="), [], [], 0.0), replace(bad, reward=None)
    assert len(make_batch([[good, failed, bad, ungraded], [failed]])) == 2
    with pytest.raises(ValueError, match="nothing to train on"):
        make_batch([[failed, ungraded]])


def test_offload_frees_the_gradients_and_keeps_what_the_next_step_needs(model_path: Path) -> None:
    trainer = GrpoTrainer(model_path)
    group = [graded(trainer, "37+45=", "82", 1.0), graded(trainer, "37+45=", "72", 0.0)]
    trainer.step([group])
    trainer.offload()
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert len(trainer.optimizer.state) == len(trainer.state_dict())
    with pytest.raises(RuntimeError, match="onload"):
        trainer.step([group])
    trainer.onload()
    trainer.step([group])


def test_state_dict_has_the_names_of_the_saved_model(model_path: Path) -> None:
    from safetensors.torch import load_file

    saved = load_file(model_path / "model.safetensors")
    state = GrpoTrainer(model_path).state_dict()
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[name], saved[name]) for name in saved)
