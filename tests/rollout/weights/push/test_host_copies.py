"""Whole tensors that a process on an engine's host makes of deltas."""

from __future__ import annotations

import pytest

from rollout.config import Transport
from rollout.weights.routes.choice import encoded_for
from rollout.weights.routes.route import Chosen, EncodingTerms, EnginePlace

torch = pytest.importorskip("torch")
from rollout.weights.push.host_copies import KnownHost  # noqa: E402
from tests.support import random_deltas  # noqa: E402
from tests.support.delta_faults import Faults  # noqa: E402
from tests.support.random_deltas import Loading, tensors_of_all_dtypes  # noqa: E402

pytestmark = pytest.mark.embedded


async def test_each_fault_is_refused_and_the_engine_loads_nothing_of_it() -> None:
    faults, engine = Faults(), Loading()
    host = faults.host()
    pushes = random_deltas.DirectPushes(engine, tensors_of_all_dtypes(), host)
    await random_deltas.check_faults(
        pushes, faults, engine.held, harmless=["repeated", "the last repeated"]
    )
    faults.fault = "lost"
    held, loads = await engine.held(), engine.loaded
    assert await pushes.push(98) == ("delta", None)
    pushes.tensors = random_deltas.changed(pushes.tensors, 0.01)
    held = await engine.held()
    encoding, failure = await pushes.push(99)
    assert (encoding, "did not load it" in str(failure)) == ("delta", True)
    assert await engine.held() == held
    assert loads is engine.loaded
    host.close()
    await pushes.aclose()


async def test_random_deltas_of_all_dtypes_arrive_with_no_wrong_bit() -> None:
    engine = Loading()
    host = Faults().host()
    pushes = random_deltas.DirectPushes(engine, tensors_of_all_dtypes(), host)
    await pushes.push(1)
    for version in range(2, 30):
        pushes.tensors = random_deltas.changed(pushes.tensors)
        assert await pushes.push(version) == ("delta", None)
        assert await engine.held() == random_deltas.fingerprints(pushes.tensors, engine.loaded)
    host.close()
    await pushes.aclose()


@pytest.mark.parametrize("holds", [3, 2, None])
@pytest.mark.parametrize("host_version", [3, -1, None])
def test_an_engine_whose_host_has_its_version_gets_a_delta_there(
    holds: int | None, host_version: int | None
) -> None:
    place = EnginePlace("engine", "", why_no_deltas="none", holds=holds, host_version=host_version)
    chosen = encoded_for(place, Chosen(Transport.TENSOR), EncodingTerms("auto", base=3))
    assert chosen.is_on_host is chosen.is_copied is (host_version is not None)
    assert chosen.encoding == ("delta" if (holds, host_version) == (3, 3) else "full")
    near = encoded_for(place, Chosen(Transport.SHARED_MEMORY), EncodingTerms("auto", base=3))
    assert not near.is_on_host


async def test_a_tensor_of_another_dtype_needs_one_more_push_of_whole_tensors() -> None:
    engine, host = Loading(), KnownHost(object())
    pushes = random_deltas.DirectPushes(engine, tensors_of_all_dtypes(), host)
    assert await pushes.push(1) == ("full", None)
    pushes.tensors["model.scale"] = pushes.tensors["model.scale"].double()
    _, failure = await pushes.push(2)
    assert "another shape or dtype" in str(failure)
    pushes.holds = None
    assert await pushes.push(3) == ("full", None)
    assert await engine.held() == random_deltas.fingerprints(pushes.tensors, engine.loaded)
    host.close()
    await pushes.aclose()
