"""Connects to a run that another process has launched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout.config.run_dir import JOURNAL_FILE
from rollout.control.server.runs import journals_of
from rollout.control.server.server import RolloutServer
from rollout.core.errors import ConfigError
from rollout.runtime.control_socket import ControlAddress, SocketCaller
from rollout.runtime.handle import RunHandle, ServerHandle


def connect_local(run: str | Path, address: str, key: str) -> RunHandle | None:
    """The servers of a run that is launched on a host, or None if no journal has an address.

    Args:
        address: ``host:port``; empty to read it and the key from the journal of a server.

    Raises:
        ConfigError: the address is none, or refuses the key.
    """
    where = _parsed(address, key) if address else _in_run_folder(Path(run))
    return None if where is None else _over_socket(where)


def _in_run_folder(run: Path) -> ControlAddress | None:
    for journal in journals_of(run):
        if journal.record is None:
            raise ConfigError(journal.trouble)
        if journal.record.control:
            return _parsed(journal.record.control, journal.record.key)
    return None


def _parsed(address: Any, key: Any) -> ControlAddress:
    host, _, port = str(address).rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"address = {address!r}: must be host:port, as in a server's {JOURNAL_FILE}"
        )
    if not key:
        raise ConfigError(
            f"key: the address {address} needs the key from a server's {JOURNAL_FILE}; or, if it "
            "is a Ray cluster's, backend='ray'"
        )
    return ControlAddress(host.strip("[]"), int(port), str(key))


def _over_socket(address: ControlAddress) -> RunHandle:
    names: list[str] = SocketCaller(address, "").request("names").result()
    callers = {name: SocketCaller(address, name) for name in names}
    return RunHandle(
        {
            name: ServerHandle(name, caller.call(RolloutServer.config).result(), caller)
            for name, caller in callers.items()
        }
    )
