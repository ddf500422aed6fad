"""Common rewards, and a reward computed by a server."""

import sys
import threading
import time

import pytest
from aiohttp import ClientError, web

from rollout.core.errors import ConfigError
from rollout.core.samples import Sample, all_samples
from rollout.driver import rewards
from rollout.driver.stream.hooks import Hooks
from tests.support.driving import SAMPLING, driving, engines, prompts


def said(text: str, answer: object = "4") -> Sample:
    return Sample([1], text=text, metadata={"answer": answer})


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0),
        ("eiffel", "eiffel tower", 0.0),
        ("Paris", ["London", "paris."], 1.0),
        ("42", 42, 1.0),
        ("", "x", 0.0),
    ],
)
def test_exact_match_ignores_case_articles_and_punctuation(text, answer, reward) -> None:
    assert rewards.exact_match()(said(text, answer)) == reward


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (B).", "B"),
        ("Answer: c", "C"),
        (r"A or B? So \boxed{D}", "D"),
        (r"\boxed{\text{E}}", "E"),
        ("It could be A. No: B", "B"),
        ("The answer  is : A, the option\n is **C", "C"),
        ("The choice:\n (d)", "D"),
        ("I think it's unclear", "I"),
        ("nothing", ""),
        (r"\boxed{12}", ""),
        (r"\boxed{{1}B} so A", "B"),
        (r"\boxed{A} \boxed{B}", "B"),
        (r"\boxed{b", ""),
    ],
)
def test_a_choice_is_the_last_one_in_the_text(text: str, letter: str) -> None:
    assert rewards.multiple_choice()(said(text, letter)) == 1.0
    assert rewards.multiple_choice()(said(text, "Z")) == 0.0


def test_multiple_choice_compares_the_letter() -> None:
    assert rewards.multiple_choice()(said("The answer is B", "b")) == 1.0
    assert rewards.multiple_choice()(said("nothing", "b")) == 0.0


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        (r"so the answer is $\boxed{\frac{1}{2}}$", "0.5", 1.0),
        (r"$\boxed{\frac{2}{4}}$", r"\frac{1}{2}", 1.0),
        ("the sum is 7", "8", 0.0),
        ("no number at all", "8", 0.0),
        (r"$x^2 - 1$", r"(x-1)(x+1)", 1.0),
    ],
)
async def test_math_compares_values_and_not_texts(text, answer, reward) -> None:
    assert await rewards.math()(said(text, answer)) == reward


async def test_math_compares_with_each_answer() -> None:
    judge = rewards.math("answers")
    sample = Sample([1], text="so $0.5$", metadata={"answers": ["4", r"\frac{1}{2}"]})
    assert await judge(sample) == 1.0
    with pytest.raises(KeyError, match="metadata has no 'answers'"):
        await judge(said("4"))


def test_math_without_its_library_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"pip install .*'math-verify>=0.8'"):
        rewards.math()


@pytest.mark.parametrize("make", [rewards.exact_match, rewards.multiple_choice])
@pytest.mark.parametrize(
    "pattern",
    [
        *("a", "A", " ", "a ", "A ", "'", "the ", "(", "(A", ")", "{", "}", "\0", "\ud800"),
        *("\u0130", r"\boxed{", r"\boxed{}", r"\boxed{{", r"\text", "*_(["),
        *("answer", "answer ", "answer is ", "answer\n", "answer:", "option is  ", "choice * "),
    ],
)
def test_a_hostile_text_takes_no_longer_than_another(make, pattern: str) -> None:
    """For one of 64 Ki characters, a pattern that goes back from each of them needs minutes."""
    repeated = pattern * (2**16 // len(pattern))
    begun = [begin + pattern[-1] * 2**16 for begin in ("answer", "answer is", r"\boxed{", "(A")]
    judge = make()
    for text in (repeated, *begun, *(f"{begin}!" for begin in begun)):
        assert min(seconds_of(judge, said(text)) for _ in range(3)) < 0.05


def seconds_of(judge, sample: Sample) -> float:
    before = time.thread_time()
    judge(sample)
    return time.thread_time() - before


@pytest.mark.parametrize("make", [rewards.exact_match, rewards.multiple_choice])
def test_a_sample_without_an_answer_raises_instead_of_being_wrong(make) -> None:
    with pytest.raises(KeyError, match="metadata has no 'answer'; it has nothing"):
        make()(Sample([1], text="x"))
    with pytest.raises(ValueError, match="empty list"):
        make()(said("x", []))


async def test_a_reward_in_a_thread_rewards_all_samples() -> None:
    threads = set()

    def length(sample: Sample) -> float:
        threads.add(threading.get_ident())
        return float(len(sample.output_ids))

    judge = rewards.in_thread(length)
    async with driving(engines(0.0), judge) as (driver, _):
        groups = await driver.rollout(0, prompts(3), group_size=2, sampling=SAMPLING)
    assert {sample.reward for sample in all_samples(groups)} == {10.0}
    assert threads
    assert threading.get_ident() not in threads


async def test_a_remote_reward_is_retried_until_it_replies() -> None:
    seen = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(await request.json())
        if len(seen) == 1:
            return web.Response(status=500)
        return web.json_response({"score": 1} if len(seen) == 2 else {"reward": 0.75})

    app = web.Application()
    app.router.add_post("/judge", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/judge"
    async with rewards.RemoteReward(url) as judge:
        hooks = Hooks(reward=judge, reward_timeout_s=5.0, reward_tries=3)
        async with driving(engines(0.0), hooks=hooks) as (driver, _):
            groups = await driver.rollout(0, prompts(1), group_size=1, sampling=SAMPLING)
    assert groups[0].rewards == [0.75]
    assert (len(seen), seen[2]["metadata"]) == (3, {"number": 1})
    await runner.cleanup()
    async with rewards.RemoteReward(url) as judge:
        with pytest.raises(ClientError):
            await judge(said("x"))
