"""A push of the same weights in the middle of requests of embedded engines, by parameter.

The embedded engine draws by the place of a token, so also at temperature 1 a reply that goes on is
the calm one.  ``real/test_seams.py`` does the same over SGLang and vLLM.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import plain_models
from tests.support.real_policy import one_engine, real_policy
from tests.support.seams import Case, cell_of, findings

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(180)]

SEEDED = {"temperature": 1.0, "sampling_seed": 3}
CASES = [
    Case("max_new_tokens", {}),
    Case("min_new_tokens", {"min_new_tokens": 150, "stop_token_ids": [*range(1, 94)]}),
    Case("stop_token_ids", {"stop_token_ids": [250]}),
    Case("ignore_eos", {"ignore_eos": False}),
    Case("sampling_seed", SEEDED),
    Case("temperature", {**SEEDED, "temperature": 0.7}),
    Case("top_p", {**SEEDED, "top_p": 0.9}),
    Case("top_k", {**SEEDED, "top_k": 20}),
    Case("skip_special_tokens", {**SEEDED, "skip_special_tokens": False}),
    Case("no_stop_trim", {**SEEDED, "no_stop_trim": True}),
    Case("stream_interval", {"stream_interval": 7}),
    Case("logprob_start_len", {}, {"logprob_start_len": 0}),
]


async def test_each_parameter_is_carried_over_a_push(tmp_path: Path) -> None:
    models = plain_models(tmp_path / "models", 1)
    group = one_engine("embedded")
    with real_policy(models, tmp_path, {"only": group}) as policy:
        url = policy.handle.url
        assert url is not None
        cases = [case.of_length(200) for case in CASES]
        cells = [cell_of("embedded", case) for case in cases]
        push = policy.handle.push
        wrong = await findings(url, cases, cells, lambda: push(policy.next_tensors()).result(60))
        assert wrong == []
