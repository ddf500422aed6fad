"""``rollout debug``: the rollout without a trainer, or a trainer without engines.

Saved groups join both halves: ``rollout.driver.data.saved_groups`` has their form.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

import rollout
from rollout.agents.model.chat_tokenizer import load_chat_tokenizer
from rollout.cli.lib.config_file import launch, load_config
from rollout.cli.lib.output import print_json, show, table
from rollout.core.errors import ConfigError
from rollout.core.samples import SampleGroup, all_samples
from rollout.driver.data.saved_groups import (
    RECORD,
    REPLAY,
    SavedGroups,
    read_groups,
    read_rows,
    write_groups,
)
from rollout.driver.stream.hooks import Reward
from rollout.driver.stream.shown_samples import shown_samples
from rollout.driver.stream.step_metrics import StepStats, step_metrics
from rollout.router.tokenizer_file import load_tokenizer

_NUM_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a rollout samples.

    Attributes:
        reward: ``module:function``, or empty for none.
    """

    prompts: Path
    reward: str
    num: int
    group_size: int
    max_new_tokens: int
    temperature: float

    def read(self, model: str) -> list[rollout.Prompt]:
        """The prompts as token ids.

        Args:
            model: folder with the tokenizer.
        """
        with _options_checked():
            data = rollout.PromptData(
                read_rows(self.prompts),
                encode=lambda prompt: _encoded(prompt, model),
                seed=None,
                num_epochs=1,
            )
        return [prompt for _ in range(self.num) if (prompt := data.take()) is not None]


def sample_prompts(
    source: Sequence[str],
    sampled: Sampled,
    out: Path,
    *,
    server: str,
    model: str,
    backend: str,
    key: str,
    as_json: bool,
) -> None:
    """Launch a configuration or use a router's URL, sample, save the groups and print figures."""
    if out.suffix != ".jsonl":  # else no command reads it again
        raise ConfigError(f"--out {out}: the name of this file ends in .jsonl")
    reward = _function(sampled.reward) if sampled.reward else None
    sampling = rollout.SamplingParams(
        max_new_tokens=sampled.max_new_tokens, temperature=sampled.temperature
    )
    # To look at: neither a failed sample nor a kind of log-probs ends it.
    options = rollout.RolloutOptions(max_failed_share=1.0, logprob_kind=None)
    with ExitStack() as stack:
        if len(source) == 1 and source[0].startswith(("http://", "https://")):
            prompts, url = sampled.read(model), source[0].rstrip("/")
        else:
            config = load_config(source).with_local_models()
            name = _server_name(config, server)
            settings = config.servers[name]
            # A mistake in them is found before engines start.
            prompts = sampled.read(model or settings.model_path)
            url = stack.enter_context(launch(config, backend))[name].url
            key = key or settings.router.client_key
        with _options_checked():
            driver = stack.enter_context(rollout.Driver(url, reward, key=key))
        start = time.monotonic()
        groups = driver.rollout(
            0, prompts, group_size=sampled.group_size, sampling=sampling, options=options
        ).result()
        seconds = time.monotonic() - start
    write_groups(out, groups)
    _print(groups, out, _NUM_SHOWN, seconds=seconds, as_json=as_json)
    if not as_json:
        show(f"saved in {out}; next: rollout debug train {out} -- python my_train.py")


def record_groups(folder: Path, command: Sequence[str]) -> None:
    """Become ``command``, whose drivers save the groups of each step in ``folder``.

    Raises:
        ConfigError: there is no such command.
    """
    SavedGroups(folder).make_folder()
    _become(command, RECORD, folder)


def train_on_saved(saved: Path, command: Sequence[str]) -> None:
    """Become ``command``, whose drivers return saved groups.

    Raises:
        ConfigError: nothing is saved there, or there is no such command.
    """
    groups = SavedGroups(saved)
    groups.read(min(groups.files()) if saved.is_dir() else 0)
    _become(command, REPLAY, saved)


def print_samples(file: Path, num: int, *, as_json: bool) -> None:
    """Print the figures of saved groups, and ``num`` samples."""
    _print(read_groups(file), file, num, as_json=as_json)


def _become(command: Sequence[str], variable: str, path: Path) -> None:
    if shutil.which(command[0]) is None:
        raise ConfigError(f"there is no command {command[0]!r}; give the script behind --")
    os.environ[variable] = str(path.absolute())
    sys.stdout.flush()
    os.execvp(command[0], list(command))


def _server_name(config: rollout.RolloutConfig, server: str) -> str:
    if server and server not in config.servers:
        raise ConfigError(f"--server {server!r}: the servers are {', '.join(config.servers)}")
    return server or next(iter(config.servers))


@contextmanager
def _options_checked() -> Iterator[None]:
    """A call whose arguments are options of the command: a wrong one is one line, not a trace."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _function(place: str) -> Reward:
    """The function ``module:function``, also of a file in this folder."""
    module, _, name = place.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function: Reward = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--reward {place!r} is no module:function: {error}") from error
    if not callable(function):
        raise ConfigError(f"--reward {place!r} is no function")
    return function


def _encoded(prompt: Any, model: str) -> list[int]:
    """The token ids of a text, or of a list of messages with the model's chat template."""
    if not model:
        raise ConfigError("rows with a text need --model, the folder with the tokenizer")
    if isinstance(prompt, str):
        return list(load_tokenizer(model).encode(prompt).ids)
    tokenizer = load_chat_tokenizer(model)
    return tokenizer.encode(tokenizer.bound(None, {}).render(prompt, for_answer=True))


def _print(
    groups: Sequence[SampleGroup], file: Path, num: int, *, seconds: float = 0.0, as_json: bool
) -> None:
    figures = step_metrics(groups, StepStats(elapsed_s=seconds))
    samples = shown_samples(groups, num)
    if as_json:
        print_json({"file": str(file), "figures": figures, "samples": samples})
        return
    show(
        _figures(groups, {key.removeprefix("rollout/"): figure for key, figure in figures.items()})
    )
    for sample in samples:
        reward = "none" if sample["reward"] is None else f"{sample['reward']:g}"
        facts = [f"reward {reward}", f"{sample['tokens']} tokens", sample["status"]]
        show("", ", ".join(filter(None, facts)), f"> {sample['prompt']}", sample["reply"])


def _figures(groups: Sequence[SampleGroup], figures: dict[str, float]) -> RenderableType:
    """The figures that a person looks at first."""
    failed = {
        key.removeprefix("failed/"): f"{value:g}"
        for key, value in figures.items()
        if key.startswith("failed/")
    }
    kinds = ", ".join(f"{num} {kind}" for kind, num in failed.items())
    versions = sorted({number for sample in all_samples(groups) for number in sample.versions})
    rows = {
        "groups, samples": "{num_groups:g}, {num_samples:g}",
        "reward": "{reward/mean:.4g} on average, {reward/min:.4g} to {reward/max:.4g}, "
        "deviation {reward/std:.3g}",
        "groups of equal rewards": "{zero_std_groups:g}",
        "output tokens": "{response_len/mean:.4g} on average, median {response_len/median:g}, "
        "{response_len/min:g} to {response_len/max:g}",
        "cut off": "{truncated_ratio:.1%}",
        "failed": "{failed_ratio:.1%}" + (f": {kinds}" if kinds else ""),
        "repetitive": "{repetition_frac:.1%}",
        "weight versions": ", ".join(map(str, versions)) or "unknown",
    }
    if figures["seconds"]:
        rows["speed"] = "{tokens_per_s:.4g} tokens/s, {seconds:.3g} s"
    shown = table("figure", "value")
    for name, form in rows.items():
        shown.add_row(name, form.format(**figures))
    return shown
