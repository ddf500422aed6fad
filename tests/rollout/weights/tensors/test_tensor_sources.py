"""A trainer's tensors in buckets: renamed, and never all whole at once."""

import weakref
from collections.abc import Iterator

import pytest

from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import TensorSpec

torch = pytest.importorskip("torch")
from rollout.weights.tensors import PlannedSource  # noqa: E402

pytestmark = pytest.mark.embedded
HIDDEN, HEAD, GROUPS, PER_GROUP = 8, 2, 2, 2


def to_hf(name: str, tensor: "torch.Tensor") -> Iterator[tuple[str, "torch.Tensor"]]:
    """A Megatron layer's fused tensors under the names of a checkpoint."""
    if name.endswith("linear_qkv.weight"):
        grouped = tensor.view(GROUPS, PER_GROUP + 2, HEAD, HIDDEN)
        yield "q_proj.weight", grouped[:, :PER_GROUP].reshape(-1, HIDDEN)
        yield "k_proj.weight", grouped[:, -2].reshape(-1, HIDDEN)
        yield "v_proj.weight", grouped[:, -1].reshape(-1, HIDDEN)
    elif name.endswith("linear_fc1.weight"):
        gate, up = tensor.chunk(2)
        yield "gate_proj.weight", gate
        yield "up_proj.weight", up
    else:
        yield name.removeprefix("decoder."), tensor


def test_megatrons_fused_tensors_come_out_under_the_checkpoints_names() -> None:
    parts = {
        name: torch.randn(rows, HIDDEN)
        for name, rows in (("q", 2 * HEAD), ("k", HEAD), ("v", HEAD))
    }
    groups = [{name: torch.randn_like(part) for name, part in parts.items()} for _ in range(GROUPS)]
    fused = torch.cat([torch.cat([one["q"], one["k"], one["v"]]) for one in groups])
    weights = PlannedSource(
        {
            "decoder.linear_qkv.weight": fused,
            "decoder.linear_fc1.weight": torch.arange(32.0).view(4, HIDDEN),
            "decoder.norm.weight": torch.ones(HIDDEN),
        },
        name_map=to_hf,
    )
    assert weights.manifest.tensors["k_proj.weight"] == TensorSpec(
        "k_proj.weight", "float32", (GROUPS * HEAD, HIDDEN)
    )
    [(pairs, is_last)] = weights.buckets(1 << 20)
    assert is_last
    found = dict(pairs)
    assert list(found) == list(weights.manifest.tensors)
    for name in "qkv":
        assert torch.equal(found[f"{name}_proj.weight"], torch.cat([one[name] for one in groups]))
    assert torch.equal(found["up_proj.weight"], torch.arange(16.0, 32.0).view(2, HIDDEN))


def test_the_map_runs_on_outlines_first_so_names_are_known_before_any_copy() -> None:
    devices = []

    def look(name: str, tensor: "torch.Tensor") -> list[tuple[str, "torch.Tensor"]]:
        devices.append(tensor.device.type)
        return [(name, tensor)]

    weights = PlannedSource({"a": torch.zeros(2)}, name_map=look)
    assert devices == ["meta"]
    list(weights.buckets(1 << 20))
    assert devices == ["meta", "cpu"]


def test_a_map_that_goes_by_values_is_refused() -> None:
    def by_value(name: str, tensor: "torch.Tensor") -> list[tuple[str, "torch.Tensor"]]:
        return [(name if tensor.is_meta else "other", tensor)]

    weights = PlannedSource({"a": torch.zeros(2)}, name_map=by_value)
    with pytest.raises(WeightMismatch, match="result for 'a' differs from that on the meta device"):
        list(weights.buckets(1 << 20))


def test_of_what_is_gathered_no_more_than_a_bucket_is_alive() -> None:
    alive, most = 0, 0

    def drop(size: int) -> None:
        nonlocal alive
        alive -= size

    def gather(name: str, tensor: "torch.Tensor") -> list[tuple[str, "torch.Tensor"]]:
        nonlocal alive, most
        if tensor.is_meta:
            return [(name, tensor)]
        whole = tensor.clone()
        alive += whole.nbytes
        most = max(most, alive)
        weakref.finalize(whole, drop, whole.nbytes)
        return [(name, whole)]

    tensors = {f"t{index}": torch.zeros(25) for index in range(20)}
    for pairs, _ in PlannedSource(tensors, name_map=gather).buckets(300):
        assert len(pairs) == 3 or len(pairs) == 2
        del pairs
    assert most == 300
    assert alive == 0
