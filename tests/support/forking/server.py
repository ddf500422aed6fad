"""The fork server: a process that has imported what engines and ranks import, and forks them.

    python -m tests.support.forking.server REQUESTS_FD OWNER_PID MODULE...

It has one thread and no descriptors but its own, and sets up nothing that two processes could not
share: no CUDA, no OpenMP region, no client.  It ends with its owner.

A request is one message: JSON and the descriptors of the child, before them one end of a socket on
which the child's pid and a handle of it are answered, and later its exit status.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from engines.process import guard
from tests.support.forking import program

MODULES = (
    "engines.embedded.server.http_server",
    "httptools",
    "pytest",
    "rollout",
    "safetensors.torch",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "uvicorn.lifespan.off",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.protocols.websockets.auto",
)
NAMES = {"transformers": ("AutoModelForCausalLM", "AutoTokenizer")}
"""Imported at their first use."""
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    # Of the libraries that start their threads when they are imported.
    "OMP_NUM_THREADS": "1",
    # As the embedded engine sets them before it imports transformers.
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
MOST_BYTES = 1 << 20
MOST_DESCRIPTORS = 8


class Server:
    """State of the server.

    Attributes:
        children: by the handle of each its pid, and where its exit status is reported.
    """

    def __init__(self, requests_fd: int, owner_pid: int) -> None:
        self.requests = socket.socket(fileno=requests_fd)
        self.requests.set_inheritable(False)
        self.owner_fd = os.pidfd_open(owner_pid)
        self.children: dict[int, tuple[int, int]] = {}
        # Ctrl-C ends the owner, and with it this process.
        self.on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def serve(self) -> None:
        """Returns when the owner is gone."""
        while True:
            poll = select.poll()
            for fd in (self.requests.fileno(), self.owner_fd, *self.children):
                poll.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}
            for handle in ready & self.children.keys():
                self.report_end(handle)
            if self.owner_fd in ready:
                return
            if self.requests.fileno() in ready and not self.take_request():
                return

    def report_end(self, handle: int) -> None:
        pid, status_fd = self.children.pop(handle)
        _, status = os.waitpid(pid, 0)
        with socket.socket(fileno=status_fd) as reply:
            _send(reply, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(handle)

    def take_request(self) -> bool:
        """False at the end of requests."""
        text, fds, _, _ = socket.recv_fds(self.requests, MOST_BYTES, MOST_DESCRIPTORS)
        if not text:
            return False
        for fd in fds:
            os.set_inheritable(fd, False)
        request: dict[str, Any] = json.loads(text)
        status_fd, *given = fds
        if num_threads() > 1:
            raise RuntimeError("a process with several threads must not fork")
        pid = os.fork()
        if pid == 0:
            self.requests.detach()
            signal.signal(signal.SIGINT, self.on_interrupt)
            run_child(request, dict(zip(request["numbers"], given, strict=True)))
        handle = os.pidfd_open(pid)
        self.children[handle] = pid, status_fd
        for fd in given:
            os.close(fd)
        with socket.socket(fileno=os.dup(status_fd)) as reply:
            _send(reply, str(pid).encode(), handle)
        return True


def run_child(request: dict[str, Any], received: dict[int, int]) -> None:
    """Never returns."""
    try:
        program.place_descriptors(received)
        os.chdir(request["cwd"])
        if request["is_session"]:
            os.setsid()
        command: list[str] = request["command"]
        if request["is_guard"]:
            job = partial(guard.main, command[-3:], program.execute)
            program.become(command, request["env"], job)
        program.execute(command[0], command, request["env"])
    except BaseException as error:
        os.write(2, f"the fork server cannot start {request['command']}: {error!r}\n".encode())
    finally:
        os._exit(127)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def load(modules: Sequence[str]) -> None:
    """Imports the modules; the collector looks at none of it again, here or in a child.

    A child has the variables that they have set, as if it had imported them.
    """
    before = dict(os.environ)
    gc.disable()
    for name in modules:
        importlib.import_module(name)
        for attribute in NAMES.get(name, ()):
            getattr(sys.modules[name], attribute)
    changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
    program.PREPARATIONS.insert(0, partial(set_again, before, changed))
    gc.enable()
    gc.collect()
    gc.freeze()


def set_again(before: Mapping[str, str], changed: Mapping[str, str]) -> None:
    """Sets the variables that imports have changed, unless they have other values here."""
    for name, value in changed.items():
        if os.environ.get(name) == before.get(name):
            os.environ[name] = value


def check(own: set[int]) -> None:
    """Check that a fork of this process can be what ``exec`` gives.

    Raises:
        RuntimeError: what was imported has started threads or opened files, or is Ray, whose
            variables a child must read itself.
    """
    if "ray" in sys.modules:
        raise RuntimeError("a module that the fork server imports has imported Ray")
    if num_threads() > 1:
        raise RuntimeError("a module that the fork server imports has started a thread")
    if others := program.descriptors() - own:
        targets = [os.readlink(f"/proc/self/fd/{fd}") for fd in others]
        raise RuntimeError(f"a module that the fork server imports has opened {targets}")


def why_not(command: list[str]) -> str:
    """Why this machine cannot fork; empty if it can."""
    try:
        program.show(command, os.environ)
    except OSError as error:
        return f"the kernel shows no other command than that of the server: {error}"
    return ""


def main(requests_fd: int, owner_pid: int, modules: Sequence[str]) -> None:
    server = Server(requests_fd, owner_pid)
    load(modules)
    check({0, 1, 2, requests_fd, server.owner_fd})
    hello = {"why_not": why_not(sys.orig_argv)}
    _send(server.requests, json.dumps(hello).encode())
    server.serve()
    os._exit(0)


def _send(reply: socket.socket, text: bytes, *fds: int) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # the owner waits for it no more
        socket.send_fds(reply, [text], fds)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
