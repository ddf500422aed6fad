"""A group by NCCL is never split from the communicator of a trainer that is bound to a GPU.

A split is a collective of all ranks of the trainer, of which only one makes the group: it would
wait for ever.  There is no NCCL here, so a double in its place keeps what torch gives it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402

from engines.tensors.collective import groups  # noqa: E402
from engines.tensors.collective.new_group import unsplit  # noqa: E402
from rollout.adapters.trl import weight_transfer  # noqa: E402
from rollout.weights.routes.trainer_groups import BroadcastRoot  # noqa: E402

pytestmark = pytest.mark.torch
GPU = torch.device("cuda", 1)


class NcclDouble(dist.ProcessGroupGloo):  # type: ignore[misc, name-defined]
    """An NCCL group as torch makes it: with options, without a connection.

    Attributes:
        options: of those that were made.
        bound: the device of the default group while each was made.
    """

    options: ClassVar[list[Any]] = []
    bound: ClassVar[list[Any]] = []
    why_not = ""

    class Options:
        split_from: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.options.append(options)
        self.bound.append(distributed_c10d._get_default_group().bound_device_id)
        if self.why_not:
            raise RuntimeError(self.why_not)
        super().__init__(store, rank, size, timedelta(seconds=5))


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Its default group, bound to a GPU as by ``init_process_group(device_id=...)``."""
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", NcclDouble, raising=False)
    monkeypatch.setattr(distributed_c10d, "_NCCL_AVAILABLE", True)
    monkeypatch.setattr(NcclDouble, "options", [])
    monkeypatch.setattr(NcclDouble, "bound", [])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    default = distributed_c10d._get_default_group()
    default.bound_device_id = GPU
    yield default
    dist.destroy_process_group()


def of_sender() -> None:
    root = BroadcastRoot("sender", "nccl", join_timeout_s=5, send_timeout_s=5)
    root.terms(0)
    root.join()


def of_engine() -> None:
    where: Any = {"master_address": "127.0.0.1", "master_port": 0, "rank": 0, "world_size": 1}
    groups.join(**where, group_name="engine", backend="nccl", timeout_s=5)


@pytest.mark.parametrize("make", [of_sender, of_engine])
def test_a_broadcast_group_is_not_split_from_the_trainers(
    trainer: Any, make: Callable[[], None]
) -> None:
    make()
    (options,) = NcclDouble.options
    assert options.split_from is None
    assert trainer.bound_device_id == GPU


def test_the_group_of_trls_main_process_is_not_split_either(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its default group is by NCCL; the one of this test stays by gloo.
    _, store = distributed_c10d._world.pg_map[trainer]
    monkeypatch.setitem(distributed_c10d._world.pg_map, trainer, (dist.Backend("nccl"), store))
    monkeypatch.setattr(distributed_c10d, "default_pg_nccl_timeout", timedelta(seconds=5))
    assert weight_transfer._own_group() is not None
    (options,) = NcclDouble.options
    assert options.split_from is None
    assert trainer.bound_device_id == GPU


def test_the_trainers_device_is_there_again_after_an_error(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NcclDouble, "why_not", "no GPU is free")
    with pytest.raises(RuntimeError, match="no GPU is free"):
        of_engine()
    assert NcclDouble.bound == [None]
    assert trainer.bound_device_id == GPU


def test_a_group_by_gloo_which_waits_for_its_members_hides_nothing(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    make = distributed_c10d._new_process_group_helper

    def helper(*given: Any, **more: Any) -> Any:
        seen.append(trainer.bound_device_id)
        return make(*given, **more)

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", helper)
    root = BroadcastRoot("sender", "gloo", join_timeout_s=5, send_timeout_s=5)
    root.terms(0)
    root.join()
    assert seen == [GPU]


def test_two_groups_at_once_both_find_no_device_and_leave_it_as_it_was(trainer: Any) -> None:
    """The second would take the first's None for the trainer's, or find the device restored."""
    second_is_in, first_is_out = threading.Event(), threading.Event()
    found = []

    def second() -> None:
        with unsplit("nccl"):
            second_is_in.set()
            assert first_is_out.wait(5)
            found.append(trainer.bound_device_id)

    thread = threading.Thread(target=second)
    with unsplit("nccl"):
        thread.start()
        second_is_in.wait(0.2)  # only without a lock
        found.append(trainer.bound_device_id)
    first_is_out.set()
    thread.join(5)
    assert found == [None, None]
    assert trainer.bound_device_id == GPU


def test_without_a_group_of_the_trainer_nothing_is_changed() -> None:
    assert not dist.is_initialized()
    with unsplit("nccl"):
        pass
