"""Named tensors to manifest and buckets.  Needs torch."""

import base64
import pickle
import pickletools
import sys
import types

import pytest

from engines.fake import FakeEngine
from engines.protocol import TensorInfo
from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.push.weight_push import PushTarget, push_weights

torch = pytest.importorskip("torch")
from engines.embedded.weights.payload_tensors import read_payload  # noqa: E402
from engines.tensors.torch_fingerprint import bytes_fingerprint  # noqa: E402
from rollout.weights.tensors import PlannedSource  # noqa: E402
from rollout.weights.tensors.payload import FlattenedTensorMetadata  # noqa: E402
from rollout.weights.tensors.shard_gather import gathered_whole  # noqa: E402
from tests.support.still_server import make_push  # noqa: E402

pytestmark = pytest.mark.embedded


def unpickled(bucket: bytes) -> dict:
    return dict(read_payload(base64.b64encode(bucket).decode(), "flattened_bucket"))


def test_a_bucket_names_sglangs_own_class_which_need_not_be_installed() -> None:
    (bucket,) = make_push({"a": torch.zeros(3)}, version=1, bucket_bytes=100).buckets
    classes = {one for code, one, _ in pickletools.genops(bucket) if code.name == "GLOBAL"}
    assert "sglang.srt.weight_sync.tensor_bucket FlattenedTensorMetadata" in classes
    assert not any("rollout" in one for one in classes)


def test_tensors_of_several_dtypes_share_a_bucket_aligned() -> None:
    tensors = {
        "a": torch.arange(3, dtype=torch.uint8),
        "b": torch.arange(3, dtype=torch.int64),
        "c": torch.arange(3, dtype=torch.bfloat16),
        "d": torch.zeros(0, dtype=torch.float32),
        "e": torch.tensor(7.0),
    }
    (bucket,) = make_push(tensors, version=1, bucket_bytes=1000).buckets
    for name, tensor in unpickled(bucket).items():
        assert torch.equal(tensor, tensors[name])
        assert tensor.dtype == tensors[name].dtype


def test_the_manifest_names_every_tensor_with_dtype_and_shape() -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}
    push = make_push(tensors, version=3, bucket_bytes=1000)
    assert push.version == 3
    specs = [TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "bfloat16", (4,))]
    assert push.manifest.tensors == Manifest.of(specs).tensors
    assert push.manifest.fingerprints == {
        name: bytes_fingerprint(name, tensor) for name, tensor in tensors.items()
    }


def test_buckets_stay_under_the_limit_unless_one_tensor_is_larger() -> None:
    tensors = {
        "a": torch.zeros(10),
        "b": torch.zeros(15),
        "c": torch.zeros(100),
        "d": torch.zeros(1),
    }
    push = make_push(tensors, version=1, bucket_bytes=100)
    assert [list(unpickled(bucket)) for bucket in push.buckets] == [["a", "b"], ["c"], ["d"]]


def test_a_view_is_sent_as_itself_and_not_with_all_its_storage() -> None:
    whole = torch.arange(100_000, dtype=torch.float32)
    push = make_push({"a": whole[7:9]}, version=1, bucket_bytes=1000)
    assert len(push.buckets[0]) < 2000
    assert torch.equal(unpickled(push.buckets[0])["a"], torch.tensor([7.0, 8.0]))


def test_a_transposed_tensor_and_a_parameter_arrive_with_the_same_numbers() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    tensors = {"t": matrix.t(), "p": torch.nn.Parameter(matrix)}
    sent = unpickled(make_push(tensors, version=1, bucket_bytes=1000).buckets[0])
    assert torch.equal(sent["t"], matrix.t())
    assert not sent["p"].requires_grad


def test_a_tied_tensor_is_sent_once_under_the_name_the_model_has() -> None:
    embed = torch.zeros(2, 2)
    expected = Manifest.of([TensorSpec("embed.weight", "float32", (2, 2))])
    tensors = {"lm_head.weight": embed, "embed.weight": embed, "extra": torch.ones(1)}
    weights = PlannedSource(tensors, expected=expected)
    assert list(weights.manifest.tensors) == ["embed.weight", "extra"]


def test_a_name_that_occurs_twice_is_refused() -> None:
    pairs = [("a", torch.zeros(1)), ("a", torch.zeros(1))]
    with pytest.raises(WeightMismatch, match="'a' is pushed twice"):
        make_push(pairs, version=1, bucket_bytes=1000)


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(WeightMismatch, match="'a' is a list, not a tensor"):
        make_push({"a": [1.0]}, version=1, bucket_bytes=1000)


def test_what_only_starts_at_the_same_address_is_not_taken_for_tied() -> None:
    fused = torch.zeros(6, 2)
    expected = Manifest.of([TensorSpec("fused", "float32", (6, 2))])
    tensors = {"fused": fused, "view": fused[:2], "none": torch.zeros(0)}
    weights = PlannedSource(tensors, expected=expected)
    assert list(weights.manifest.tensors) == ["fused", "view", "none"]


async def test_a_fake_engine_takes_a_real_push() -> None:
    tensors = (TensorInfo("a", "float32", (2, 3)), TensorInfo("b", "float32", (4,)))
    engine = FakeEngine(tensors=tensors)
    engine.weights.lose()
    push = make_push({"a": torch.ones(2, 3), "b": torch.ones(4)}, version=1, bucket_bytes=20)
    answers = await push_weights(push, {"fake": PushTarget(engine)}, budget_s=10)
    assert answers["fake"].failure is None
    assert len(push.buckets) == 2
    assert not engine.weights_are_garbage


def test_a_plain_unpickler_that_knows_sglangs_class_reads_a_bucket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As SGLang does, which has torch load the storage."""
    module = types.ModuleType("sglang.srt.weight_sync.tensor_bucket")
    module.FlattenedTensorMetadata = FlattenedTensorMetadata
    for name in ("sglang", "sglang.srt", "sglang.srt.weight_sync"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tensors = {
        "a": torch.arange(3, dtype=torch.uint8),
        "b": torch.randn(2, 70000),
        "none": torch.zeros(0, 2),
        "FlattenedTensorMetadata": torch.randn(5).to(torch.bfloat16),
    }
    (bucket,) = make_push(tensors, version=1, bucket_bytes=1 << 20).buckets
    read = pickle.loads(bucket)
    flat = read["flattened_tensor"]
    assert flat.dtype == torch.uint8
    assert flat.shape == (sum(one.nbytes for one in tensors.values()),)
    assert {one.name for one in read["metadata"]} == set(tensors)
    for one in read["metadata"]:
        assert one.numel == one.end_idx - one.start_idx
        content = flat[one.start_idx : one.end_idx].view(one.dtype).reshape(one.shape)
        assert torch.equal(content, tensors[one.name])


def test_buckets_by_value_are_small_however_large_others_are() -> None:
    tensors = {f"t{index}": torch.zeros(5 << 20, dtype=torch.uint8) for index in range(7)}
    push = make_push(tensors, version=1, bucket_bytes=1 << 30)
    assert [len(unpickled(bucket)) for bucket in push.buckets] == [3, 3, 1]


def test_a_gather_of_whole_tensors_of_the_right_dtype_converts_none() -> None:
    """A call of ``to`` takes a microsecond for each of tens of thousands of experts."""
    from torch.overrides import TorchFunctionMode

    converted = []

    class Conversions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function is torch.Tensor.to:
                converted.append(args[0].dtype)
            return function(*args, **(kwargs or {}))

    tensors = [
        torch.zeros(2),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2, requires_grad=True),
    ]
    with Conversions():
        gathered_whole(tensors)
        assert converted == []
        as_bfloat16 = gathered_whole(tensors, torch.bfloat16)
    assert converted == [torch.float32, torch.float32]
    assert [one.dtype for one in as_bfloat16] == [torch.bfloat16, torch.int64, torch.bfloat16]
