"""An agent's session over real SGLang: its ids, its limits, its end of an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

import rollout
from rollout.runtime.local import launch_local
from tests.support.chat_models import THINKS_FIRST, TOOLS
from tests.support.models import make_plain_model
from tests.support.real_policy import one_engine, real_config

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
CONTEXT = 512


def test_a_session_has_the_ids_that_sglang_sampled(tmp_path: Path) -> None:
    model = make_plain_model(tmp_path / "model", seed=1)
    (model / "chat_template.jinja").write_text(THINKS_FIRST)
    groups = {"main": one_engine(options={"context-length": CONTEXT})}
    with launch_local(real_config(model, tmp_path, groups)) as deployment:
        policy = deployment["policy"]
        with policy.session() as session:
            client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
            ask: Any = client.chat.completions.create
            options = {"model": "policy", "tools": TOOLS, "temperature": 0}
            history = [{"role": "user", "content": "one"}]
            whole = ask(messages=history, max_tokens=16, **options)
            history += [whole.choices[0].message, {"role": "user", "content": "two"}]
            *_, last = ask(messages=history, stream=True, **options)  # fills the context
            assert last.choices[0].finish_reason == "length"
            first, second = session.turns().result(60)
            (sample,) = session.samples().result(60)
        assert [first["drift"], second["drift"]] == ["clean", "realigned"]
        assert whole.usage.prompt_tokens_details.cached_tokens == first["cached_tokens"] == 0
        assert second["cached_tokens"] >= len(first["prompt_ids"])
        assert first["engine_id"] == second["engine_id"] != ""
        assert CONTEXT - 8 <= len(sample.prompt_ids) + len(sample.output_ids) <= CONTEXT
        prompt = first["prompt_ids"] + first["output_ids"] + second["prompt_ids"]
        greedy = rollout.SamplingParams(max_new_tokens=16, temperature=0.0)
        replayed = policy.generate(prompt, greedy).result(60)
        assert list(replayed.output_ids) == second["output_ids"][:16]
        assert sum(sample.mask) == 16 + len(second["output_ids"])
        assert sample.versions == [0, 0]
