"""Two-digit addition with a verifiable reward, and a warm-started policy that often fails at it.

A prompt is ``"37+45="``; the right completion is ``"82"`` and the end token.  The warm start trains
a tiny model on right sums first, and then on sums in which most carries are missing (``72``).  So
the policy starts with about three right completions in ten: where there is no carry, and sometimes
elsewhere, often enough for GRPO to learn from.  Nothing is downloaded.

Always true: no two of the three splits share a pair of numbers, in either order; the same seed
makes the same splits and, on the same machine, the same weights.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path

import rollout
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = ("<pad>", "<eos>", *"0123456789+=")
PAD_ID, EOS_ID = 0, 1
TOKEN_IDS = {token: index for index, token in enumerate(VOCABULARY)}

PROMPT_LENGTH = 6
"""Tokens of every prompt: two digits, plus, two digits, equals."""
MAX_NEW_TOKENS = 4
"""Tokens of the longest right completion: three digits and the end token."""

SAMPLING = rollout.SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=1.0)
"""Of training; the evaluation is greedy."""

NUM_EVAL_PAIRS, NUM_TRAIN_PAIRS = 256, 800
"""Pairs for evaluation and pairs for GRPO; the other 3 039 are for the warm start."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A sum of two numbers between 10 and 99."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def prompt_ids(self) -> list[int]:
        return encode(self.prompt)

    @property
    def answer(self) -> str:
        return str(self.left + self.right)

    def careless_answer(self, forget_rate: float, rng: random.Random) -> str:
        """The sum, added column by column; each carry is forgotten with ``forget_rate``."""
        units = self.left % 10 + self.right % 10
        carry = units >= 10 and rng.random() >= forget_rate
        tens = self.left // 10 + self.right // 10 + carry
        hundreds = tens >= 10 and rng.random() >= forget_rate
        return f"{'1' if hundreds else ''}{tens % 10}{units % 10}"


@dataclass(frozen=True, slots=True)
class Splits:
    """Problems by use; the warm start has each of its pairs in both orders."""

    warm_start: tuple[Problem, ...]
    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]


def make_splits(seed: int) -> Splits:
    """Distribute all pairs of two-digit numbers over the three splits."""
    rng = random.Random(seed)
    pairs = list(combinations_with_replacement(range(10, 100), 2))
    rng.shuffle(pairs)
    problems = [Problem(*(pair if rng.random() < 0.5 else pair[::-1])) for pair in pairs]
    held_out, train, rest = (
        problems[:NUM_EVAL_PAIRS],
        problems[NUM_EVAL_PAIRS : NUM_EVAL_PAIRS + NUM_TRAIN_PAIRS],
        problems[NUM_EVAL_PAIRS + NUM_TRAIN_PAIRS :],
    )
    swapped = [Problem(p.right, p.left) for p in rest if p.left != p.right]
    return Splits(tuple(rest + swapped), tuple(train), tuple(held_out))


def encode(text: str) -> list[int]:
    """Token ids of ``text``, one per character."""
    return [TOKEN_IDS[character] for character in text]


def reward(prompt: str, completion: str | Sequence[int], answer: str) -> float:
    """1.0 for the right answer, 0.0 for anything else.

    ``completion`` is the text from the engine without special tokens, or its token ids, which must
    then end with the end token.  This rule does not need ``prompt``; others may.
    """
    expected = answer if isinstance(completion, str) else [*encode(answer), EOS_ID]
    return float((completion if isinstance(completion, str) else list(completion)) == expected)


def prompts(problems: Sequence[Problem]) -> list[rollout.Prompt]:
    """Problems as prompts for the driver, with text, and the answer for ``judge``."""
    return [
        rollout.Prompt(
            tuple(encode(problem.prompt)), {"prompt": problem.prompt, "answer": problem.answer}
        )
        for problem in problems
    ]


def training_prompts(splits: Splits, step: int, num_prompts: int) -> list[rollout.Prompt]:
    """The prompts of a training step, counted from 1; after the last problem, the first again."""
    start = (step - 1) * num_prompts % len(splits.train)
    return prompts((splits.train * 2)[start : start + num_prompts])


def held_out_sums(splits: Splits) -> dict[str, rollout.EvalDataset]:
    """The evaluation: greedy answers to problems that are not trained on."""
    greedy = rollout.SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=0.0)
    return {"addition": rollout.EvalDataset(prompts(splits.held_out), greedy)}


def judge(sample: rollout.Sample) -> float:
    """The reward function for the driver."""
    return reward("", sample.output_ids, sample.metadata["answer"])


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    tokenizer = Tokenizer(models.WordLevel(TOKEN_IDS, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )


def make_model(seed: int, head_dim: int = 16) -> Qwen3ForCausalLM:
    """An untrained policy of Qwen3 shape, float32, 0.5 million parameters, 2 MB."""
    num_heads = 128 // head_dim
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=head_dim,
        max_position_embeddings=64,
        # With Qwen3's default of 0.02, layers this narrow learn several times slower.
        initializer_range=0.06,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def make_warm_started_model(
    path: Path | str,
    seed: int,
    *,
    num_steps: int = 600,
    batch_size: int = 64,
    learning_rate: float = 3e-3,
    forget_rate: float = 0.8,
    head_dim: int = 16,
) -> None:
    """Train a new model on sums and write it as a Hugging Face directory.

    For three quarters of the steps the answers are right, so that the model learns the carry.  For
    the last quarter each carry is forgotten with probability ``forget_rate``, drawn each time a
    problem is used, so that the model learns this probability and not single answers.
    ``batch_size`` is in problems.  ``head_dim`` is the size of an attention head: it divides 128,
    and vLLM's CPU kernels take 32, 64 and 128.
    """
    model = make_model(seed, head_dim).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    # A warm-up over a twentieth of the steps, then a cosine decay to zero.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, 20 * (step + 1) / num_steps) * 0.5 * (1 + math.cos(math.pi * step / num_steps))
        ),
    )
    problems = make_splits(seed).warm_start
    rng = random.Random(seed)
    for step in range(num_steps):
        is_careless = step >= num_steps * 3 // 4
        tokens = _padded_answers(
            rng.choices(problems, k=batch_size), forget_rate if is_careless else 0.0, rng
        )
        logits = model(input_ids=tokens[:, :-1]).logits[:, PROMPT_LENGTH - 1 :]
        targets = tokens[:, PROMPT_LENGTH:]
        loss = functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=PAD_ID
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval().save_pretrained(path)
    make_tokenizer().save_pretrained(path)


def _padded_answers(
    problems: Sequence[Problem], forget_rate: float, rng: random.Random
) -> torch.Tensor:
    """Prompts with answers, int64 ``[len(problems), PROMPT_LENGTH + MAX_NEW_TOKENS]``."""
    rows = []
    for problem in problems:
        ids = [*encode(problem.prompt + problem.careless_answer(forget_rate, rng)), EOS_ID]
        rows.append(ids + [PAD_ID] * (PROMPT_LENGTH + MAX_NEW_TOKENS - len(ids)))
    return torch.tensor(rows)
