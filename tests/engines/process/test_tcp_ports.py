import pickle
import socket

import pytest

from engines.process.tcp_ports import HIGH, LOW, reserve_port
from engines.protocol.errors import PortTaken


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
