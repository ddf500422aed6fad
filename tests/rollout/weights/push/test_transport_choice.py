"""Which transport a push takes."""

import pytest

from rollout.config import Transport
from rollout.core.errors import ConfigError
from rollout.weights.push.transport_choice import choose_transport

AUTO, TENSOR, SHARED = Transport.AUTO, Transport.TENSOR, Transport.SHARED_MEMORY


@pytest.mark.parametrize(
    ("wanted", "remote", "why_no_room", "chosen"),
    [
        (AUTO, [], "", SHARED),
        (AUTO, ["e-1"], "", TENSOR),
        (AUTO, [], "64 MB", TENSOR),
        (TENSOR, [], "", TENSOR),
        (SHARED, [], "64 MB", SHARED),  # named in the settings: the refusal has the figures
        (Transport.DISTRIBUTED, ["e-1"], "64 MB", Transport.DISTRIBUTED),
        (Transport.DISK, ["e-1"], "", Transport.DISK),
    ],
)
def test_the_choice(
    wanted: Transport, remote: list[str], why_no_room: str, chosen: Transport
) -> None:
    assert choose_transport(wanted, remote, why_no_room) is chosen


@pytest.mark.parametrize("wanted", [SHARED, Transport.CUDA_IPC])
def test_memory_of_one_host_does_not_reach_another(wanted: Transport) -> None:
    with pytest.raises(ConfigError, match=rf"{wanted}: engine e-1 runs on another host.*use dist"):
        choose_transport(wanted, ["e-1"], "")
