"""How tensors are written is chosen beside the route: what is true of it, and a second encoding."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.fake import FakeEngine
from engines.tensors.fingerprint import BYTES
from rollout.config import EncodingChoice, Transport, WeightUpdate
from rollout.core.errors import ConfigError
from rollout.weights.format.encoding import BegunPush, EncodingTerms
from rollout.weights.push.encodings import ENCODINGS
from rollout.weights.push.push import PushRequest
from rollout.weights.push.weight_push import push_weights
from rollout.weights.routes.choice import ROUTES, WHOLE, choose, encoded_for
from rollout.weights.routes.rank_end import Encoding
from rollout.weights.routes.route import Chosen, EnginePlace, PushTarget, RankPlace
from tests.support.still_server import HERE, StillServer, server_config

torch = pytest.importorskip("torch")
from safetensors.torch import load_file  # noqa: E402

from engines.tensors.payload import encodings as engines_encodings  # noqa: E402
from engines.tensors.torch_fingerprint import bytes_fingerprint  # noqa: E402
from rollout.weights.ranks.follower import Follower  # noqa: E402
from rollout.weights.ranks.leader import Leader, push_of_one_rank  # noqa: E402
from rollout.weights.ranks.trainer_rank import TrainerRank  # noqa: E402
from rollout.weights.tensors.sources import Pairs  # noqa: E402

pytestmark = pytest.mark.embedded
ENGINE = EnginePlace("engine", HERE, ("GPU-0",))
TOY = EnginePlace("toy", HERE, encodings=("negative",))
ANY = EncodingTerms("auto")


def made(base: int | None = None, density: float | None = None) -> dict[str, Encoding]:
    """Those of a rank; of deltas, it has copies of this version."""
    found = {name: make() for name, make in ENCODINGS.items()}
    found["delta"].copies = SimpleNamespace(version=base, density=density)  # type: ignore[attr-defined]
    return found


# -- the contract -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENCODINGS)
def test_an_encoding_is_found_by_the_name_that_engines_report(name: str) -> None:
    assert ENCODINGS[name]().name == name
    assert name in engines_encodings.ENCODINGS
    assert name in list(EncodingChoice)


@pytest.mark.parametrize("transport", ROUTES)
def test_an_engine_has_whole_tensors_under_the_name_of_its_route(transport: str) -> None:
    assert encoded_for(ENGINE, Chosen(transport), WHOLE, made()) == Chosen(transport)


def test_whole_tensors_cost_no_call_for_each_tensor(tmp_path: Path) -> None:
    rank = TrainerRank(server_config(shared_memory_path=str(tmp_path)))
    server = StillServer()
    with push_of_one_rank(rank, server, PushRequest({"t": torch.ones(4)}, 7), may_stream=False):
        assert [kept.copies for kept in rank.encodings.values()] == [None]  # type: ignore[attr-defined]
    rank.close()


# -- another encoding -------------------------------------------------------------------------


class Negative:
    """Every number with the other sign, for engines that are toys; an encoder of itself."""

    name = "negative"
    density = stored = None

    def goes(self, transport: str, version: int | None, terms: EncodingTerms) -> bool | str:
        return True

    def begin(self, push: BegunPush | None) -> Negative | None:
        return None if push is None else self

    def encode(self, pairs: Any) -> Any:
        return Pairs.of([(f"{name}#negative", -tensor) for name, tensor in pairs])

    def succeed(self) -> None:
        """It keeps nothing."""


class Loading(FakeEngine):
    """Has the tensors of the files that it loads.

    Attributes:
        is_negative: some came with the other sign.
    """

    is_negative = False

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.loaded: dict[str, Any] = {}

    async def update_weights_from_disk(self, model_path: str, **more: Any) -> None:
        for file in glob.glob(f"{model_path}/*.safetensors"):
            for name, tensor in load_file(file).items():
                whole, mark, _ = name.partition("#negative")
                self.is_negative |= bool(mark)
                self.loaded[whole] = -tensor if mark else tensor.clone()
        await super().update_weights_from_disk(model_path, **more)


@pytest.fixture
def another() -> Iterator[None]:
    others = dict(ENCODINGS)
    ENCODINGS.clear()
    ENCODINGS.update({Negative.name: Negative, **others})
    yield
    del ENCODINGS[Negative.name]


@pytest.mark.parametrize("may_stream", [False, True], ids=["copied", "streamed"])
@pytest.mark.parametrize("names", [["toy"], ["toy", "other"], ["other"]], ids="+".join)
@pytest.mark.parametrize("transport", ["shared_memory", "disk"])
async def test_another_encoding_goes_by_the_same_route_and_is_compared_with_the_whole_tensors(
    names: list[str], may_stream: bool, transport: str, tmp_path: Path, another: None
) -> None:
    settings = {
        "encoding": "auto",
        "stream": may_stream,
        "bucket_bytes": 256,
        "transport": transport,
        "disk_path": str(tmp_path / "{version}"),
    }
    rank = TrainerRank(server_config(shared_memory_path=str(tmp_path), **settings))
    tensors = {f"t{number}": torch.randn(64) for number in range(3)}
    engines = {name: Loading(name) for name in names}
    places = {"toy": TOY, "other": EnginePlace("other", HERE)}
    server = StillServer(engines=[places[name] for name in names])
    fingerprints: dict[str, str] = {}
    with push_of_one_rank(rank, server, PushRequest(tensors, 7), may_stream=may_stream) as made:
        targets = {name: PushTarget(one, is_compared=True) for name, one in engines.items()}
        answers = await push_weights(made.weights, targets, budget_s=30, fingerprints=fingerprints)
    assert [answer.failure for answer in answers.values()] == [None] * len(names)
    assert fingerprints == {name: bytes_fingerprint(name, one) for name, one in tensors.items()}
    for name, engine in engines.items():
        assert engine.is_negative is (name == "toy")
        assert engine.loaded.keys() == tensors.keys()
        assert all(torch.equal(engine.loaded[one], tensors[one]) for one in tensors)
    rank.close()
    has_checkpoint = transport == "disk" and "other" in names
    assert os.listdir(tmp_path) == ["7"] * has_checkpoint


@pytest.mark.parametrize("transport", [one for one in ROUTES if not ROUTES[one].is_encoded])
def test_a_route_that_reads_the_trainers_own_tensors_carries_whole_ones(
    transport: str, another: None
) -> None:
    assert encoded_for(TOY, Chosen(transport), ANY, made()).is_full
    assert not encoded_for(TOY, Chosen(Transport.BY_VALUE), ANY, made()).is_full


@pytest.mark.parametrize("store", [None, {"path": "/dev/shm"}], ids=["no store", "store"])
@pytest.mark.parametrize("transport", ["shared_memory", "disk"])
def test_copies_for_the_store_are_of_whole_tensors(
    store: dict[str, Any] | None, transport: str, tmp_path: Path, another: None
) -> None:
    paths = {"disk_path": str(tmp_path / "{version}")}
    settings = {"encoding": "auto", "transport": transport, "store": store, **paths}
    rank = TrainerRank(server_config(shared_memory_path=str(tmp_path), **settings))
    server = StillServer(engines=[TOY], fingerprints=BYTES)
    tensors = {"t": torch.ones(64)}
    with push_of_one_rank(rank, server, PushRequest(tensors, 7), may_stream=False):
        files = list(tmp_path.rglob("*.safetensors"))
        sums = sorted(float(sum(load_file(file).values()).sum()) for file in files)
    assert sums == ([-64.0, 64.0] if store else [-64.0])
    rank.close()


# -- deltas -----------------------------------------------------------------------------------


def encoding_of(
    transport: Transport = Transport.BY_VALUE,
    wanted: str = "auto",
    *,
    num_ranks: int = 1,
    base: int | None = 3,
    density: float | None = None,
    **engine: Any,
) -> tuple[str, bool]:
    """What an engine that holds version 3 gets, and whether copies are kept of it."""
    place = EnginePlace("engine", HERE, **{"encodings": ("delta",), "weight_version": 3, **engine})
    terms = EncodingTerms(wanted, num_ranks)
    return given(encoded_for(place, Chosen(transport), terms, made(base, density)))


def given(chosen: Chosen) -> tuple[str, bool]:
    return "full" if chosen.is_full else chosen.encoding, chosen.is_read


@pytest.mark.parametrize(
    ("transport", "wanted"),
    [
        (Transport.BY_VALUE, "auto"),
        (Transport.BY_VALUE, "delta"),
        (Transport.SHARED_MEMORY, "delta"),
        (Transport.DISK, "auto"),
        (Transport.DISK, "delta"),
        (Transport.DISTRIBUTED, "auto"),
        (Transport.DISTRIBUTED, "delta"),
    ],
)
def test_an_engine_with_the_version_of_the_copies_gets_a_delta(
    transport: Transport, wanted: str
) -> None:
    assert encoding_of(transport, wanted) == ("delta", True)
    assert encoding_of(transport, wanted, weight_version=2) == ("full", True)
    assert encoding_of(transport, wanted, weight_version=None) == ("full", True)
    assert encoding_of(transport, wanted, base=None) == ("full", True)
    assert encoding_of(transport, wanted, base=None, weight_version=None) == ("full", True)
    assert encoding_of(transport, "full") == ("full", False)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"encodings": ()}, "it applies whole tensors only; use auto or full$"),
        ({"is_compared": False}, "its weights are not compared with the pushed ones"),
        ({"transport": Transport.CUDA_IPC}, "cuda_ipc carries whole tensors only"),
        ({"transport": Transport.SHARED_MEMORY, "num_ranks": 2}, "written by several ranks"),
    ],
)
def test_what_takes_no_delta_is_refused_by_name_and_gets_whole_tensors_from_auto(
    settings: dict[str, Any], why: str
) -> None:
    assert encoding_of(**settings) == ("full", False)
    with pytest.raises(ConfigError, match=f"weights.encoding = delta: engine engine: .*{why}"):
        encoding_of(**settings, wanted="delta")


@pytest.mark.parametrize(
    ("transport", "density", "encoding"),
    [
        (Transport.BY_VALUE, 0.29, "delta"),
        (Transport.BY_VALUE, 0.31, "full"),
        (Transport.DISTRIBUTED, 0.29, "delta"),
        (Transport.DISTRIBUTED, 0.31, "full"),
        (Transport.SHARED_MEMORY, 0.001, "full"),
        (Transport.SHARED_MEMORY, None, "full"),
    ],
)
def test_auto_goes_by_the_route_and_the_density_of_the_last_push(
    transport: Transport, density: float | None, encoding: str
) -> None:
    assert encoding_of(transport, density=density) == (encoding, encoding == "delta")
    assert encoding_of(transport, "delta", density=density) == ("delta", True)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"weight_version": 3}, ("delta", True)),
        ({"weight_version": 2}, ("full", True)),
        ({"weight_version": 2, "encodings": ()}, ("full", False)),
    ],
)
def test_all_engines_of_a_broadcast_get_what_each_of_them_applies(
    other: dict[str, Any], expected: tuple[str, bool]
) -> None:
    both: Any = {"encodings": ("delta",), "weight_version": 3}
    engines = [EnginePlace("far", "there", **both), EnginePlace("other", "there", **both | other)]
    engines.append(EnginePlace("by value", "there", **both, is_reached=False))
    chosen = choose(Transport.AUTO, [RankPlace(HERE)], engines, terms=ANY, encodings=made(3))
    found = {name: (one.transport, *given(one)) for name, one in chosen.items()}
    assert found == {
        "far": (Transport.DISTRIBUTED, *expected),
        "other": (Transport.DISTRIBUTED, *expected),
        "by value": (Transport.BY_VALUE, "delta", True),
    }


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]], ids=["one host", "two hosts"])
def test_a_trainer_of_several_ranks_broadcasts_deltas_from_rank_0(hosts: list[int]) -> None:
    rank = TrainerRank(server_config(transport="distributed", encoding="delta"), 0, hosts)
    server = StillServer()
    follower = Follower(rank, server, PushRequest({"t": torch.ones(4)}, 7), 10)
    leader = Leader(server, follower, WeightUpdate.FULL, may_stream=True, streams=True)
    readies = [follower.ready()] * 2
    assert leader.decide(readies).broadcast == Chosen("distributed", encoding="delta")
    rank.close()
