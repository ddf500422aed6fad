"""Deltas against copies: every bit, of every dtype, and nothing of a damaged one.  Needs torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from engines.embedded.core.errors import Invalid  # noqa: E402
from engines.embedded.weights.broadcast_receiver import BroadcastReceiver  # noqa: E402
from engines.embedded.weights.disk_update import update_from_disk  # noqa: E402
from engines.embedded.weights.model_weights import ModelWeights  # noqa: E402
from engines.tensors.collective.bucket import content_of  # noqa: E402
from engines.tensors.delta import (  # noqa: E402
    SUFFIX,
    Delta,
    bits_of,
    make_delta,
    read_delta,
)
from engines.tensors.torch_fingerprint import as_bytes  # noqa: E402
from rollout.weights.routes.disk import EncodedBuilder, Workplace  # noqa: E402
from rollout.weights.routes.trainer_groups import (  # noqa: E402
    BroadcastRoot,
    broadcast_parts,
)
from rollout.weights.tensors.bucket_bytes import FlatLayoutCache, Flattener  # noqa: E402
from rollout.weights.tensors.delta_base import DeltaBase, DeltaPush  # noqa: E402
from rollout.weights.tensors.push_plan import specs_of  # noqa: E402
from rollout.weights.tensors.sources import Pairs  # noqa: E402

pytestmark = pytest.mark.embedded
DTYPES = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8"]
DTYPES += ["int32", "int64", "uint8", "bool"]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (64, 33), (2, 3, 129), (9000,)]
DENSITIES = [0.0, 0.001, 0.01, 0.03, 0.1, 0.5, 1.0]


def random_bits(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """Any bits: of floats also NaN with a payload, -0.0, infinite and subnormal values."""
    made = torch.Generator().manual_seed(seed)
    size = getattr(torch, dtype).itemsize
    high = 2 if dtype == "bool" else 256
    count = torch.Size(shape).numel() * size
    raw = torch.randint(0, high, (count,), generator=made, dtype=torch.uint8)
    return raw.view(getattr(torch, dtype)).view(shape)


def changed(tensor: Any, density: float, seed: int) -> Any:
    made = torch.Generator().manual_seed(seed)
    others = bits_of(random_bits(tensor.shape, str(tensor.dtype).removeprefix("torch."), seed))
    chosen = torch.rand(others.shape, generator=made) < density
    return torch.where(chosen, others, bits_of(tensor)).view(tensor.dtype).view(tensor.shape)


class Engine:
    """The weights of an embedded engine."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        model = torch.nn.Module()
        self._holder = model
        self.weights = ModelWeights(model)
        self.weights._by_name = self.weights._tensors = {
            name: tensor.clone() for name, tensor in tensors.items()
        }
        self.version = 0
        self.weights.version = lambda: str(self.version)
        self._receiver = BroadcastReceiver(self.weights, torch.device("cpu"))
        self._flattener = Flattener(FlatLayoutCache())

    def apply(self, pairs: Any) -> None:
        self.weights.check((name, tensor.shape, tensor.dtype) for name, tensor in pairs)
        for change in self.weights.changes(list(pairs)):
            change()

    def load(self, pairs: Any, folder: str) -> None:
        builder = EncodedBuilder(Workplace(Path(folder)))
        update_from_disk(self.weights, builder.make(0, pairs)["path"])
        builder.close()

    def receive(self, pairs: Any) -> None:
        """A broadcast, without the group: what rank 0 sends is what is received."""
        root = Root()
        for part in broadcast_parts(pairs, root, self._flattener, ""):
            plan = self._receiver.plan(content_of(part.payload))
            buffer = self._receiver.take(plan)
            root.targets = self._receiver.parts(plan, buffer)
            assert part.then is not None
            part.then()
            self._receiver.deliver(plan, buffer)

    def num_wrong_bits(self, tensors: Mapping[str, Any]) -> int:
        return sum(
            int((bits_of(self.weights.find(name)) != bits_of(tensor)).sum())
            for name, tensor in tensors.items()
        )


class Root(BroadcastRoot):
    """Of a group whose only engine has these targets."""

    def __init__(self) -> None:
        super().__init__("group", "gloo", join_timeout_s=1, send_timeout_s=1)
        self.targets: Sequence[Any] = ()

    def send(self, tensors: Sequence[Any]) -> None:
        for target, tensor in zip(self.targets, tensors, strict=True):
            as_bytes(target).copy_(as_bytes(tensor))


def push(held: DeltaBase, tensors: Mapping[str, Any], version: int) -> Any:
    """What engines get that hold the version before, if the copies are of it."""
    one = DeltaPush(version, held.version, {})
    held.begin(one)
    made = held.take(one, Pairs.of(tensors.items()))
    held.succeed(one)
    return made


TENSORS = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.sampled_from(DENSITIES)),
    min_size=1,
    max_size=5,
)


@pytest.fixture(params=["by value", "by broadcast", "by disk"], scope="module")
def send(request: pytest.FixtureRequest) -> Iterator[Callable[[Engine, Any], None]]:
    """Gives an engine a bucket."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        if request.param == "by disk":
            yield lambda engine, pairs: engine.load(pairs, folder)
        else:
            yield Engine.apply if request.param == "by value" else Engine.receive
        assert os.listdir(folder) == []


@given(TENSORS, st.integers(0, 2**31))
def test_every_bit_is_that_of_the_trainer(
    send: Callable[[Engine, Any], None], kinds: list[tuple[str, Any, float]], seed: int
) -> None:
    tensors = {f"t{n}": random_bits(kind[1], kind[0], seed + n) for n, kind in enumerate(kinds)}
    held, engine = DeltaBase(), Engine(tensors)
    assert push(held, tensors, 0).specs == specs_of(list(tensors.items()))
    for version in (1, 2, 3):
        num_changed = 0
        for number, (name, (_, _, density)) in enumerate(zip(tensors, kinds, strict=True)):
            new = changed(tensors[name], density, seed + 10 * version + number)
            num_changed += int((bits_of(new) != bits_of(tensors[name])).sum())
            tensors[name] = new
        made = push(held, tensors, version)
        send(engine, made)
        engine.version = version
        assert engine.num_wrong_bits(tensors) == 0
        assert len(made) >= 1
        if held.density is not None and not any(kind[2] > 0.1 for kind in kinds):
            assert held.num_changed == num_changed


def one_percent() -> tuple[DeltaBase, Engine, Any, Any]:
    """Copies, an engine, what it gets, and the tensors that it then has."""
    tensors = {"a": random_bits((64, 64), "bfloat16", 1), "b": random_bits((999,), "float32", 2)}
    held, engine = DeltaBase(), Engine(tensors)
    push(held, tensors, 0)
    new = {name: changed(tensor, 0.01, 3) for name, tensor in tensors.items()}
    return held, engine, push(held, new, 1), new


def test_whole_tensors_beside_a_delta_of_another_base_are_not_taken_either() -> None:
    _, engine, made, new = one_percent()
    before = {name: engine.weights.find(name).clone() for name in ("a", "b")}
    engine.version = 7
    with pytest.raises(Invalid, match="nothing was updated: push whole tensors"):
        engine.receive(Pairs.of([("a", new["a"]), made[1]]))
    assert engine.num_wrong_bits(before) == 0


@pytest.mark.parametrize("fault", ["flipped", "cut", "longer", "another name", "empty"])
def test_a_damaged_delta_is_refused_before_anything_is_changed(fault: str) -> None:
    _, engine, made, _ = one_percent()
    before = {name: engine.weights.find(name).clone() for name in ("a", "b")}
    names = [name for name, _ in made]
    assert names == ["a" + SUFFIX, "b" + SUFFIX]
    content = made.tensors[1]
    num_refused = 0
    for place in range(0, content.numel(), 3):
        wrong, name = content.clone(), names[1]
        if fault == "flipped":
            wrong[place] ^= 1 << place % 8
        elif fault == "cut":
            wrong = content[:place].clone()
        elif fault == "longer":
            wrong = torch.cat([content, content[: place + 1]])
        elif fault == "empty":
            wrong = content[:0]
        else:
            name = "a" + SUFFIX
        pairs = [(name, wrong)] if fault == "another name" else [made[0], (name, wrong)]
        with pytest.raises(Invalid, match="nothing was updated"):
            engine.apply(pairs)
        num_refused += 1
    assert num_refused > 20
    assert engine.num_wrong_bits(before) == 0


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({"base": "7"}, "a delta of float32 'b' from weight version 7 is not for weight version 0"),
        ({"shape": (3, 333)}, r"has shape \[3, 333\], the model's has \[999\]"),
        ({"dtype": "int32"}, "is int32, the model's is float32"),
        ({"name": "c"}, "unknown weight 'c'"),
        ({"num_changed": 2}, "of another length"),
    ],
)
def test_a_delta_of_another_base_or_model_is_refused(head: dict[str, Any], words: str) -> None:
    _, engine, _, _ = one_percent()
    fields = {"name": "b", "dtype": "float32", "shape": (999,), "base": "0", "num_changed": 1}
    made = Delta(**{**fields, **head})
    content = make_delta(made, torch.tensor([998], dtype=torch.int32), torch.ones(1).int())
    with pytest.raises(Invalid, match=words):
        engine.apply([(made.name + SUFFIX, content)])


@pytest.mark.parametrize("position", [999, 70_000, 2**31 - 1])
def test_an_element_that_the_tensor_does_not_have_is_refused(position: int) -> None:
    head = Delta("b", "float32", (999,), "0", 1)
    content = make_delta(head, torch.tensor([position], dtype=torch.int32), torch.ones(1).int())
    with pytest.raises(ValueError, match="elements that the tensor does not have"):
        read_delta("b" + SUFFIX, content)


def test_a_tensor_that_is_not_contiguous_is_changed_in_place() -> None:
    tensors = {"a": random_bits((8, 6), "bfloat16", 1)}
    held, engine = DeltaBase(), Engine(tensors)
    whole = torch.zeros(6, 8, dtype=torch.bfloat16)
    engine.weights._by_name["a"] = whole.t()
    push(held, tensors, 0)
    engine.weights.find("a").copy_(tensors["a"])
    tensors["a"] = tensors["a"].clone()
    tensors["a"][3, 4] = 1.5
    engine.apply(push(held, tensors, 1))
    assert engine.num_wrong_bits(tensors) == 0
    assert whole[4, 3] == 1.5


def test_tied_tensors_are_changed_under_either_name() -> None:
    held, engine, made, new = one_percent()
    engine.weights._by_name["tied"] = engine.weights.find("a")
    engine.apply(made)
    engine.version = 1
    new["a"] = changed(new["a"], 0.01, 9)
    engine.apply(push(held, new, 2))
    assert torch.equal(bits_of(engine.weights.find("tied")), bits_of(new["a"]))


def test_a_push_that_did_not_succeed_leaves_no_version_to_begin_from() -> None:
    held, _, _, new = one_percent()
    failed = DeltaPush(2, held.version, {})
    held.begin(failed)
    held.take(failed, Pairs.of(new.items()))
    assert held.version is None
    assert [name for name, _ in push(held, new, 3)] == ["a", "b"]
    assert held.version == 3


def test_a_push_that_another_has_overtaken_changes_no_copies() -> None:
    held, _, _, new = one_percent()
    early, late = DeltaPush(2, held.version, {}), DeltaPush(3, None, {})
    held.begin(early)
    held.begin(late)
    held.take(late, Pairs.of(new.items()))
    others = Pairs.of([("a", new["a"] * 0), ("b", new["b"] * 0)])
    assert held.take(early, others) is others
    held.succeed(early)
    assert held.version is None
    held.succeed(late)
    assert held.version == 3
    (only,) = push(held, new, 4)
    assert read_delta(*only).num_changed == 0


def test_what_another_dtype_or_shape_has_is_sent_whole() -> None:
    held, _, _, new = one_percent()
    new["a"] = new["a"].view(torch.float16)
    made = push(held, new, 2)
    assert [name for name, _ in made] == ["a"]
    known = Pairs.of([("a", new["a"].view(torch.bfloat16)), ("b", new["b"])]).specs
    wider = DeltaPush(3, held.version, {spec.name: spec for spec in known})
    held.begin(wider)
    assert "a" in [name for name, _ in held.take(wider, Pairs.of(new.items()))]


def test_copies_are_those_of_the_tensors_and_are_freed() -> None:
    held, _, _, new = one_percent()
    assert held.num_bytes == sum(tensor.nbytes for tensor in new.values())
    density = held.density
    assert density == held.num_changed / (64 * 64 + 999)
    held.drop()
    assert (held.num_bytes, held.version, held.density) == (0, None, density)
    for _ in range(15):
        held.drop()
    assert held.density is None


def test_a_delta_has_a_byte_or_two_for_the_position_of_each_changed_element() -> None:
    tensors = {"a": random_bits((1 << 20,), "bfloat16", 1)}
    held = DeltaBase()
    push(held, tensors, 0)
    each = {0.0001: 4, 0.001: 4, 0.01: 4, 0.03: 4, 0.1: 3, 0.3: 3}
    for version, (density, size) in enumerate(each.items(), 1):
        tensors["a"] = changed(tensors["a"], density, version)
        num_bytes = sum(tensor.nbytes for tensor in push(held, tensors, version).tensors)
        assert held.num_changed * size < num_bytes < held.num_changed * size * 1.05 + 200
