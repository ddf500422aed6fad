"""The framing that the push stream, the store and the control socket use."""

import json
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.core import wire
from tests.support.processes import wait_until

TOKEN = "secret"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda one: st.lists(one, max_size=3)
)
HEADS = st.dictionaries(st.text(), JSON, max_size=4)


def frame(head: bytes, num_bytes: int = 0) -> bytes:
    return struct.pack("<IQ", len(head), num_bytes) + head


@contextmanager
def pair(timeout_s: float = 30.0) -> Iterator[tuple[wire.Connection, socket.socket]]:
    """A connection, and the raw socket of its other side."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        opened = socket.create_connection(server.getsockname())
        raw, _ = server.accept()
    with raw, closing(wire.Connection(opened, timeout_s)) as connection:
        yield connection, raw


@contextmanager
def listening(
    serve: Callable[[wire.Connection], None], timeout_s: float = 30.0
) -> Iterator[wire.Listener]:
    listener = wire.Listener(serve, TOKEN, name="test", timeout_s=timeout_s)
    try:
        yield listener
    finally:
        listener.close(10.0)


def connect(listener: wire.Listener, token: str = TOKEN) -> wire.Connection:
    return wire.connect(listener.address, token, connect_s=10.0, timeout_s=30.0)


def echo(connection: wire.Connection) -> None:
    while True:
        head, num_bytes = connection.receive(may_idle=True)
        connection.send(head, connection.body(num_bytes))


def raw_socket(listener: wire.Listener) -> socket.socket:
    return socket.create_connection(listener.address, 10.0)


def is_closed_by_listener(raw: socket.socket) -> bool:
    """Whether the listener ends a connection after its greeting."""
    raw.settimeout(30.0)
    try:
        while raw.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


# -- messages -------------------------------------------------------------------------------


@given(st.lists(st.tuples(HEADS, st.binary(max_size=200)), min_size=1, max_size=5), st.data())
def test_messages_arrive_as_they_were_sent_however_they_are_cut(
    messages: list[tuple[dict[str, Any], bytes]], data: st.DataObject
) -> None:
    whole = b"".join(frame(json.dumps(head).encode(), len(body)) + body for head, body in messages)
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=4))
    places = [0, *sorted(cuts), len(whole)]
    with pair() as (connection, raw):

        def send() -> None:
            for first, end in pairwise(places):
                raw.sendall(whole[first:end])

        sending = threading.Thread(target=send)
        sending.start()
        for head, body in messages:
            assert connection.receive() == (head, len(body))
            assert connection.body(len(body)) == body
        sending.join()


@given(HEADS, st.binary(max_size=100), st.data())
def test_a_message_that_is_cut_off_is_an_error(
    head: dict[str, Any], body: bytes, data: st.DataObject
) -> None:
    whole = frame(json.dumps(head).encode(), len(body)) + body
    end = data.draw(st.integers(0, len(whole) - 1))
    with pair() as (connection, raw):
        raw.sendall(whole[:end])
        raw.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="was closed"):
            connection.body(connection.receive()[1])


@given(st.binary(min_size=12, max_size=300))
def test_any_bytes_are_a_message_or_an_error_of_the_connection(noise: bytes) -> None:
    with pair() as (connection, raw):
        raw.sendall(noise)
        raw.shutdown(socket.SHUT_WR)

        def read_all() -> None:
            while True:
                connection.body(connection.receive()[1], 1 << 20)

        with pytest.raises(ConnectionError):
            read_all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (struct.pack("<IQ", (64 << 20) + 1, 0), "not valid"),
        (struct.pack("<IQ", 2, (1 << 40) + 1) + b"{}", "not valid"),
        (frame(b"[" * 100_000), "not valid"),
        (frame(b"\xff"), "not valid"),
        (frame(b"[]"), "not a JSON object"),
        (frame(b"{}", 11), "too long; at most 10"),
    ],
)
def test_what_is_too_long_or_no_head_is_refused_before_it_is_kept(
    content: bytes, message: str
) -> None:
    with pair() as (connection, raw):
        raw.sendall(content)
        with pytest.raises(ConnectionError, match=message):
            connection.body(connection.receive()[1], 10)


def test_a_file_and_pieces_go_as_one_body(tmp_path: Path) -> None:
    content = os.urandom(3 << 20)
    (tmp_path / "unit").write_bytes(content)
    received = bytearray(len(content))

    def serve(connection: wire.Connection) -> None:
        with (tmp_path / "unit").open("rb") as file:
            connection.announce({}, len(content) - 5)
            connection.send_file(file.fileno(), 5, len(content) - 5)
        connection.announce({"pieces": 2}, 4)
        connection.write(b"ab")
        connection.write(b"cd")

    with listening(serve) as listener, closing(connect(listener)) as connection:
        assert connection.receive() == ({}, len(content) - 5)
        connection.receive_into(memoryview(received)[5:])
        assert received[5:] == content[5:]
        assert connection.body(connection.receive()[1]) == b"abcd"


# -- deadlines, and the end of waits --------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"\x02", frame(b"{}")[:-1]])
def test_a_peer_that_sends_nothing_more_is_not_waited_for(sent: bytes) -> None:
    with pair(timeout_s=0.2) as (connection, raw):
        raw.sendall(sent)
        with pytest.raises(TimeoutError, match=r"within 0\.2 s"):
            connection.receive(may_idle=bool(sent))


def test_a_head_that_comes_byte_by_byte_has_one_deadline() -> None:
    with pair(timeout_s=0.5) as (connection, raw):
        stop = threading.Event()

        def drip() -> None:
            for byte in frame(b"{" + b" " * 1000 + b"}"):
                if stop.wait(0.05):
                    return
                raw.sendall(bytes([byte]))

        dripping = threading.Thread(target=drip)
        dripping.start()
        with pytest.raises(TimeoutError):
            connection.receive()
        stop.set()
        dripping.join()


def test_a_peer_that_takes_nothing_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "unit").write_bytes(bytes(64 << 20))
    with pair(timeout_s=0.2) as (connection, _):
        with pytest.raises(TimeoutError, match=r"taken within 0\.2 s"):
            connection.send({}, bytes(64 << 20))
        with (tmp_path / "unit").open("rb") as file, pytest.raises(TimeoutError):
            connection.send_file(file.fileno(), 0, 64 << 20)


@pytest.mark.parametrize(
    "wait",
    [
        lambda one: one.receive(may_idle=True),
        lambda one: one.body(1),
        lambda one: one.write(bytes(64 << 20)),
    ],
    ids=["idle", "body", "write"],
)
def test_the_end_ends_who_waits_in_another_thread(wait: Callable[[wire.Connection], Any]) -> None:
    with pair() as (connection, _):
        ended: list[BaseException] = []

        def run() -> None:
            try:
                wait(connection)
            except OSError as error:
                ended.append(error)

        waiting = threading.Thread(target=run)
        waiting.start()
        while not connection.has_ended():
            connection.end()  # also before it waits
        waiting.join(10.0)
        assert len(ended) == 1
        assert not isinstance(ended[0], TimeoutError)


def test_an_idle_connection_knows_whether_the_other_side_has_ended() -> None:
    with pair() as (connection, raw):
        assert not connection.has_ended()
        raw.close()
        with pytest.raises(ConnectionError):
            connection.receive()
        assert connection.has_ended()


# -- who may talk ---------------------------------------------------------------------------


def test_who_knows_the_token_is_served() -> None:
    with listening(echo) as listener, closing(connect(listener)) as connection:
        connection.send({"a": 1}, b"body")
        head, num_bytes = connection.receive()
        assert (head, connection.body(num_bytes)) == ({"a": 1}, b"body")


@pytest.mark.parametrize("token", ["guess", "", TOKEN + "x"])
def test_a_wrong_token_is_refused_in_words(token: str) -> None:
    served: list[wire.Connection] = []
    with (
        listening(served.append) as listener,
        pytest.raises(wire.Refused, match="wrong token: it is of another run"),
    ):
        connect(listener, token)
    assert not served


def test_the_token_is_never_sent() -> None:
    """A listener that does not know the token learns nothing, and is refused."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard: list[bytes] = []

        def impostor() -> None:
            opened, _ = server.accept()
            with closing(wire.Connection(opened, 30.0)) as connection:
                connection.send({"library": wire.VERSION, "nonce": "0" * 32})
                hello, _ = connection.receive()
                heard.append(json.dumps(hello).encode())
                connection.send({"digest": hello["digest"]})  # the caller's own digest, sent back

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(wire.Refused, match="does not know the token"):
            wire.connect(server.getsockname(), TOKEN, connect_s=10.0, timeout_s=30.0)
        thread.join()
    assert TOKEN.encode() not in heard[0]


OTHER_VERSION = f"ray-rollout '9.9', and this process {wire.VERSION!r}: use the same version"


def test_a_listener_refuses_another_version_in_words() -> None:
    with listening(echo) as listener, raw_socket(listener) as raw:
        connection = wire.Connection(raw, 30.0)
        connection.receive()
        connection.send({"library": "9.9", "nonce": "", "digest": ""})
        assert OTHER_VERSION in connection.receive()[0]["refused"]


def test_a_caller_refuses_another_version_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def newer() -> None:
            opened, _ = server.accept()
            with closing(wire.Connection(opened, 30.0)) as connection:
                connection.send({"library": "9.9", "nonce": "0" * 32})
                with suppress(ConnectionError):
                    connection.receive()

        thread = threading.Thread(target=newer)
        thread.start()
        with pytest.raises(wire.Refused, match=re.escape(OTHER_VERSION)):
            wire.connect(server.getsockname(), TOKEN, connect_s=10.0, timeout_s=30.0)
        thread.join()


STRANGERS = st.one_of(
    st.binary(max_size=100),
    st.sampled_from([b"GET / HTTP/1.1\r\n\r\n", frame(b"{}", 1), frame(b" " * 2000 + b"{}")]),
    HEADS.map(lambda head: frame(json.dumps(head).encode())),
    st.tuples(st.text(), st.text(), st.text()).map(
        lambda texts: frame(
            json.dumps(dict(zip(("library", "nonce", "digest"), texts, strict=True))).encode()
        )
    ),
)


@given(st.lists(STRANGERS, min_size=1, max_size=3))
def test_no_stranger_is_served_or_keeps_anything(contents: list[bytes]) -> None:
    served: list[wire.Connection] = []
    with listening(served.append) as listener:
        for content in contents:
            with raw_socket(listener) as raw:
                raw.sendall(content)
                with suppress(OSError):  # the listener has closed it already
                    raw.shutdown(socket.SHUT_WR)
                assert is_closed_by_listener(raw)
        assert not served
        connect(listener).close()
        assert wait_until(lambda: bool(served), 60)


def test_a_slow_stranger_and_a_long_one_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "GREETING_S", 0.3)
    with listening(echo) as listener:
        with raw_socket(listener) as raw:
            raw.sendall(b"\x02")
            assert is_closed_by_listener(raw)
        monkeypatch.setattr(wire, "GREETING_S", 600.0)
        with raw_socket(listener) as raw:
            raw.sendall(struct.pack("<IQ", 1 << 20, 0))  # a head longer than a greeting
            assert is_closed_by_listener(raw)


def test_the_oldest_stranger_makes_room_and_those_who_know_the_token_take_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "MAX_STRANGERS", 2)
    with listening(echo) as listener:
        known = [connect(listener) for _ in range(4)]
        strangers = []
        for _ in range(3):
            strangers.append(raw_socket(listener))
            assert strangers[-1].recv(12)
        assert is_closed_by_listener(strangers[0])
        for raw in strangers[1:]:
            raw.settimeout(0.2)
            raw.recv(1024)
            with pytest.raises(TimeoutError):  # it waits for their answer
                raw.recv(1)
        # Callers with the token come in, and the strangers stay few.
        known += [connect(listener) for _ in range(4)]
        assert len(listener._unproved) <= 2
        for connection in known:
            connection.send({"still": "served"})
            assert connection.receive()[0] == {"still": "served"}
            connection.close()
        for raw in strangers:
            raw.close()


def test_callers_who_come_together_are_all_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answers at once, so none is a stranger whose place another one needs."""
    monkeypatch.setattr(wire, "MAX_STRANGERS", 2)
    begin = threading.Barrier(40)

    def call(listener: wire.Listener) -> Any:
        begin.wait(20)
        connection = connect(listener)
        with closing(connection):
            connection.send({"is": "served"})
            return connection.receive()[0]

    with listening(echo) as listener, ThreadPoolExecutor(40) as callers:
        answers = list(callers.map(call, [listener] * 40))
    assert answers == [{"is": "served"}] * 40


# -- the end of a listener ------------------------------------------------------------------


def test_close_ends_every_connection_and_its_thread() -> None:
    listener = wire.Listener(echo, TOKEN, name="closed", timeout_s=600.0)
    known, stranger = connect(listener), raw_socket(listener)
    with stranger, closing(known):
        assert stranger.recv(1)
        listener.close(30.0)
        with pytest.raises(ConnectionError):
            known.receive()
        assert is_closed_by_listener(stranger)
    assert not [one for one in threading.enumerate() if one.name.startswith("closed")]
    with pytest.raises(ConnectionRefusedError):
        connect(listener)


def test_a_listener_that_accepts_no_more_serves_on() -> None:
    with listening(echo) as listener, closing(connect(listener)) as connection:
        listener.stop_accepting()
        with pytest.raises(ConnectionRefusedError):
            connect(listener)
        connection.send({}, b"still")
        assert connection.body(connection.receive()[1]) == b"still"


def test_a_listener_that_cannot_accept_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the process has too many open files."""
    monkeypatch.setattr(wire, "_RETRY_S", 0.01)
    failures = [OSError(24, "Too many open files")] * 2
    real = wire.Connection.__init__

    def init(self: wire.Connection, opened: socket.socket, timeout_s: float) -> None:
        if threading.current_thread().name == "test-accept" and failures:
            error = failures.pop()
            opened.close()  # the caller's error is behind this
            raise error
        real(self, opened, timeout_s)

    monkeypatch.setattr(wire.Connection, "__init__", init)
    with listening(echo) as listener:
        while failures:
            with pytest.raises(OSError, match=r"closed|reset"):
                connect(listener)
        with closing(connect(listener)) as connection:
            connection.send({"now": 1})
            assert connection.receive()[0] == {"now": 1}


def test_one_bad_caller_does_not_end_the_listener() -> None:
    def serve(connection: wire.Connection) -> None:
        head, _ = connection.receive()
        connection.send({"value": head["wanted"]})

    with listening(serve) as listener:
        with closing(connect(listener)) as bad:
            bad.send({})
            with pytest.raises(ConnectionError, match="was closed"):
                bad.receive()
        with closing(connect(listener)) as good:
            good.send({"wanted": 3})
            assert good.receive()[0] == {"value": 3}
