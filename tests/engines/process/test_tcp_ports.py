import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engines.process import tcp_ports
from engines.process.tcp_ports import HIGH, LOW, Listening, reserve_port, who_listens
from engines.protocol.errors import PortTaken

LOOPBACK = "127.0.0.1"
PROGRAM = """
import socket, sys
listener = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
if "shared" in sys.argv:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
listener.bind((sys.argv[1], int(sys.argv[2])))
listener.listen()
print(flush=True)
sys.stdin.read()
"""


def free_port() -> int:
    with reserve_port() as reservation:
        return reservation.port


def test_a_reserved_port_lies_in_the_range():
    with reserve_port() as reservation:
        assert LOW <= reservation.port <= HIGH


def test_no_two_reservations_share_a_port():
    reservations = [reserve_port(low=28000, high=28049) for _ in range(20)]
    assert len({each.port for each in reservations}) == 20
    for each in reservations:
        each.release()


def test_the_last_free_port_of_a_range_is_found():
    low = free_port()
    with reserve_port(port=low), reserve_port(low=low - 1, high=low) as other:
        assert other.port == low - 1


def test_a_full_range_is_told():
    port = free_port()
    with reserve_port(port=port), pytest.raises(PortTaken, match=f"from {port} to {port}"):
        reserve_port(low=port, high=port)


def test_a_taken_port_is_named_with_what_to_do():
    with reserve_port() as held, pytest.raises(PortTaken, match="leave the port out") as caught:
        reserve_port(port=held.port)
    assert caught.value.port == held.port
    assert f"port {held.port} on 127.0.0.1 is taken" in str(caught.value)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.port) == (str(caught.value), held.port)


def test_a_port_with_a_server_on_it_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(PortTaken):
        reserve_port(port=server.getsockname()[1])


def test_after_release_a_server_can_bind_it():
    reservation = reserve_port()
    reservation.release()
    with socket.create_server(("127.0.0.1", reservation.port)):
        pass


def test_release_may_be_repeated():
    with reserve_port() as reservation:
        reservation.release()
        reservation.release()


def test_the_port_of_a_server_that_just_ended_can_be_reserved_once():
    port = free_port()
    with (
        socket.create_server(("127.0.0.1", port)) as server,
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first keeps the port in TIME_WAIT
        client.recv(1)
    with reserve_port(port=port), pytest.raises(PortTaken):
        reserve_port(port=port)


def test_an_address_of_another_machine_is_an_os_error():
    with pytest.raises(OSError, match="assign"):
        reserve_port("203.0.113.1")


def test_ipv6_addresses_are_reserved_too():
    try:
        reservation = reserve_port("::1")
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    reservation.release()


@contextmanager
def listening(host: str, port: int, *more: str, by: tuple[str, ...] = ()) -> Iterator[int]:
    """The process id of another program that listens there."""
    command = [*by, sys.executable, "-c", PROGRAM, host, str(port), *more]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        if not program.stdout.readline():
            pytest.skip(f"cannot listen on {host} here")
        yield program.pid
        program.stdin.close()


def test_a_port_on_which_no_program_listens_is_neither_ours_nor_a_strangers():
    with reserve_port() as bound:
        assert who_listens(LOOPBACK, bound.port, lambda: {os.getpid()}) == Listening()


def test_a_listener_is_ours_by_its_process_and_else_a_stranger_with_id_and_name():
    port = free_port()
    with listening(LOOPBACK, port) as pid:
        assert who_listens(LOOPBACK, port, lambda: {pid}) == Listening(is_ours=True)
        found = who_listens(LOOPBACK, port, lambda: {os.getpid()})
    assert not found.is_ours
    assert found.stranger.startswith(f"process {pid} (python")


@pytest.mark.parametrize(("host", "counts"), [("0.0.0.0", 1), ("::", 1), ("127.0.0.2", 0)])
def test_what_listens_at_all_addresses_counts_and_at_another_address_does_not(host, counts):
    port = free_port()
    with listening(host, port) as pid:
        stranger = who_listens(LOOPBACK, port, set).stranger
    assert stranger.startswith(f"process {pid} " if counts else "")
    assert bool(stranger) == bool(counts)


def test_a_port_that_a_stranger_shares_with_us_is_a_strangers():
    port = free_port()
    with (
        listening(LOOPBACK, port, "shared") as ours,
        listening(LOOPBACK, port, "shared") as other,
    ):
        found = who_listens(LOOPBACK, port, lambda: {ours})
        assert found.stranger.startswith(f"process {other} ")
        assert not found.is_ours
        assert who_listens(LOOPBACK, port, lambda: {ours, other}).is_ours


def test_a_process_of_ours_that_was_born_between_the_lists_is_no_stranger():
    port = free_port()
    with listening(LOOPBACK, port) as pid:
        looks = iter([set[int](), {pid}])
        assert who_listens(LOOPBACK, port, lambda: next(looks)).is_ours


def test_sockets_of_another_network_are_not_seen():
    port = free_port()
    up = (
        "unshare",
        "--user",
        "--map-root-user",
        "--net",
        "sh",
        "-c",
        'ip link set lo up; "$@"',
        "",
    )
    with listening("0.0.0.0", port, by=up):
        assert who_listens(LOOPBACK, port, set) == Listening()


@pytest.mark.parametrize(("user", "is_ours"), [(os.geteuid(), True), (os.geteuid() + 1, False)])
def test_a_process_of_ours_that_shows_no_sockets_passes_for_its_own_user(
    monkeypatch, caplog, user, is_ours
):
    port = free_port()
    shown = tcp_ports._held_by

    def held_by(pid: int) -> Iterator[int]:
        if pid == hidden:
            raise PermissionError(pid)
        return shown(pid)

    monkeypatch.setattr(tcp_ports, "_held_by", held_by)
    monkeypatch.setattr(tcp_ports, "_user_of", lambda pid: user)
    with listening(LOOPBACK, port) as hidden:
        found = who_listens(LOOPBACK, port, lambda: {hidden})
    assert found.is_ours == is_ours
    if is_ours:
        assert f"process {hidden} of an engine are not shown" in caplog.text
    else:
        assert found.stranger == f"a process of user {os.geteuid()}"


def test_where_the_kernel_shows_no_sockets_the_launch_goes_on_with_a_warning(monkeypatch, caplog):
    def refuse(*_: object) -> dict[int, int]:
        raise PermissionError("/proc/net/tcp")

    monkeypatch.setattr(tcp_ports, "_listeners", refuse)
    assert who_listens(LOOPBACK, 1, set) == Listening(is_ours=True)
    assert "who listens at 127.0.0.1:1 is not known" in caplog.text
