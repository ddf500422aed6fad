"""What a process of this machine does, and which processes are not of the run."""

import os
import socket

from rollout.cli.lib.process_info import pid_of, process_state, stack


def test_a_process_is_identified_by_its_listening_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert pid_of({"url": url, "pid": os.getpid()}) == os.getpid()
        assert pid_of({"url": url, "pid": None}) == os.getpid()  # attached: its pid is not reported


def test_a_pid_of_another_node_is_not_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert pid_of({"url": f"http://192.0.2.7:{port}", "pid": os.getpid()}) is None
        assert pid_of({"url": f"http://127.0.0.1:{port}", "pid": 2**22 - 1}) is None
    assert pid_of({"url": f"http://127.0.0.1:{port}", "pid": os.getpid()}) is None
    assert pid_of({"url": "", "pid": os.getpid()}) is None


def test_a_process_is_described_and_one_that_is_gone_is_no_error() -> None:
    assert "% CPU" in process_state(os.getpid())
    assert str(2**22 - 1) in process_state(2**22 - 1)
    assert stack(2**22 - 1).startswith("(no stack")
