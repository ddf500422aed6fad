"""Connects to a run that another process has launched."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout.config.run_dir import CONNECT_FILE, RunFolder
from rollout.control.server.server import RolloutServer
from rollout.core.errors import ConfigError
from rollout.runtime.control_socket import ControlAddress, ControlListener, SocketCaller
from rollout.runtime.handle import RunHandle, ServerHandle


def connect_local(run: str | Path, address: str, key: str) -> RunHandle | None:
    """The servers of a run that is launched on a host; None if the run's folder has no address.

    Args:
        address: ``host:port``; empty to read it and the key from the run's folder.

    Raises:
        ConfigError: the address is none, or refuses the key.
    """
    where = _parsed(address, key) if address else _in_run_folder(Path(run))
    return None if where is None else _over_socket(where)


def publish(run: RunFolder, listener: ControlListener) -> Callable[[], None]:
    """Write the listener's address into the run's folder, for its user alone; returns the undo."""
    path = run.path / CONNECT_FILE
    part = path.with_name(f".{CONNECT_FILE}.part")
    part.unlink(missing_ok=True)
    where = listener.address
    values = {"address": f"{where.host}:{where.port}", "key": where.key}
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(values, file)
    part.replace(path)
    return lambda: path.unlink(missing_ok=True)


def _in_run_folder(run: Path) -> ControlAddress | None:
    for folder in (run, Path("runs") / run):
        path = folder / CONNECT_FILE
        try:
            values = json.loads(path.read_bytes())
            return _parsed(values["address"], values["key"])
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
    return None


def _parsed(address: Any, key: Any) -> ControlAddress:
    host, _, port = str(address).rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"address = {address!r}: must be host:port, as in the run's {CONNECT_FILE}"
        )
    if not key:
        raise ConfigError(
            f"key: the address {address} needs the key from the run's {CONNECT_FILE}; or, if it is "
            "a Ray cluster's, backend='ray'"
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
