"""Every route of the embedded engine and every key: what is refused never reaches a handler."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from engines.embedded.server import control_api
from engines.embedded.server.app import ROUTES
from engines.http.key_check import Refusal, check
from engines.launch import EngineSpec, LocalLauncher
from engines.protocol import EngineAccess

OPEN = {"/health", "/ready"}
# Of the module of control calls, the one that changes nothing.
QUERIES = {"/weights_manifest"}
ACCESS = EngineAccess("sample", "steer")


def needs_control(handler: object, path: str) -> bool:
    return getattr(handler, "__module__", "") == control_api.__name__ and path not in QUERIES


@pytest.mark.parametrize(("path", "handler"), [(path, handler) for path, _, handler in ROUTES])
def test_a_handler_that_changes_the_engine_needs_the_control_key(
    path: str, handler: object
) -> None:
    wrong = ["", "Bearer wrong"] + ["Bearer sample"] * needs_control(handler, path)
    for key in wrong if path not in OPEN else []:
        with pytest.raises(Refusal):
            check(ACCESS, path, key, "")
    for key in {"Bearer sample", "Bearer steer"} - set(wrong):
        check(ACCESS, path, key, "")


async def test_a_launched_engine_refuses_all_that_has_not_its_key(
    models: dict[str, Path], tmp_path: Path
) -> None:
    spec = EngineSpec("main-0", "embedded", str(models["first"]), str(tmp_path / "engine.log"))
    engine = await LocalLauncher().launch(spec)
    access = engine.access
    try:
        async with httpx.AsyncClient(base_url=engine.endpoint.url, trust_env=False) as http:
            for path, methods, handler in ROUTES:
                keys = ["", "wrong", *[access.sampling] * needs_control(handler, path)]
                for key in keys:
                    headers = {"Authorization": f"Bearer {key}"} if key else {}
                    reply = await http.request(methods[0], path, headers=headers)
                    assert reply.status_code == (200 if path in OPEN else 401), path
                    assert path not in OPEN or reply.content == b""
            for key in (access.sampling, access.control):
                headers = {"Authorization": f"Bearer {key}"}
                reply = await http.get("/server_info", headers=headers)
                assert reply.status_code == 200
                assert not {access.sampling, access.control} & set(reply.text.split('"'))
    finally:
        await engine.stop(5.0)
