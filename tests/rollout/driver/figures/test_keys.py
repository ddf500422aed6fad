"""The figures of a real step have the names of the reference's table, and no others."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from rollout.driver.data.prompt import Prompt
from rollout.driver.driver import Driver
from rollout.driver.evaluation import EvalDataset
from rollout.driver.figures.keys import KEYS, families
from rollout.rules.lifecycle import Command
from rollout.runtime.local import launch_local
from tests.support.driving import SAMPLING, always
from tests.support.paged import step
from tests.support.served_fakes import TIMEOUT_S, launched
from tests.support.tracker_doubles import Mine

# Where a step has no reason for them.
SOMETIMES = {
    *("rollout/failed/{kind}", "rollout/rejected/{reason}", "rollout/journal_lost_s"),
    *("server/unchanged_tensors", "server/draft_accepted_ratio"),
}


def pattern_of(key: str) -> re.Pattern[str]:
    """What the names of a row look like: one of the words in braces, or any word in their place."""
    parts = re.split(r"\{(.+?)\}", key)
    texts = [re.escape(part) for part in parts]
    texts[1::2] = [
        f"({'|'.join(map(re.escape, part.split(',')))})" if "," in part else "([^/]+)"
        for part in parts[1::2]
    ]
    return re.compile("".join(texts))


def rows_of(names: Collection[str]) -> dict[str, list[str]]:
    """The rows of the table that each name fits."""
    patterns = {key: pattern_of(key) for key in KEYS}
    return {
        name: [key for key, pattern in patterns.items() if pattern.fullmatch(name)]
        for name in names
    }


def test_a_step_an_evaluation_and_a_check_log_exactly_the_names_of_the_table(
    tmp_path: Path,
) -> None:
    mine = Mine()
    with launched(launch_local, tmp_path) as handle:
        policy = handle["policy"]
        step(policy, 1)
        with Driver(policy.url, always(1.0), trackers=mine) as driver:
            prompts = [Prompt((1, 2))]
            groups = driver.rollout(0, prompts, group_size=2, sampling=SAMPLING).result(TIMEOUT_S)
            datasets = {"small": EvalDataset(prompts, num_samples=2)}
            driver.evaluate(0, datasets).result(TIMEOUT_S)
            samples = [sample for group in groups for sample in group.samples]
            driver.check_logprobs(groups, [sample.output_logprobs for sample in samples])
    logged = {name for _, figures in mine.figures for name in figures}
    rows = rows_of(logged)
    assert {name: of for name, of in rows.items() if len(of) != 1} == {}
    assert {row for of in rows.values() for row in of} == KEYS.keys() - SOMETIMES
    # A choice of words stands for all of them.
    for key in KEYS.keys() - SOMETIMES:
        if "," in key:
            words = key[key.index("{", key.rindex("/")) + 1 : -1].split(",")
            assert len([name for name in logged if rows[name] == [key]]) >= len(words), key
    commands = {name.rpartition("/")[2] for name in logged if "/phase_s/" in name}
    assert commands <= set(Command)
    assert families() == ["rollout", "server", "logprob_gap", "eval"]
