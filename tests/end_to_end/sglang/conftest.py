"""Two groups of one real SGLang engine each behind the real router, started once for all here."""

from tests.support.real_fixtures import real_fixtures

models, keeper, policy, known_weights_after = real_fixtures("sglang")
