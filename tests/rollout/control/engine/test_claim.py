"""One run at a time drives an attached engine, as far as runs on one host see each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engines.protocol import Endpoint
from rollout.control.engine import claim
from rollout.control.engine.claim import Claim, remove_ended
from rollout.core.errors import ConfigError

ENGINE = Endpoint("127.0.0.1", 4000)
HOLD = """
import sys
from pathlib import Path
from engines.protocol import Endpoint
from rollout.control.engine import claim
claim.BASE = Path(sys.argv[1])
held = claim.Claim(Endpoint("127.0.0.1", 4000), "theirs-0", sys.argv[2], "groups.theirs",
                   takeover=False)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(claim, "BASE", tmp_path / "base")
    return tmp_path / "base"


def claimed(folder: str, endpoint: Endpoint = ENGINE, *, takeover: bool = False) -> Claim:
    return Claim(endpoint, "theirs-0", folder, "groups.theirs", takeover=takeover)


@contextmanager
def another_run(base: Path, folder: str = "/runs/other") -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(base), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder
        holder.kill()


def test_a_second_run_is_refused_in_words_and_let_in_when_the_first_was_killed(base: Path) -> None:
    with another_run(base) as holder:
        with pytest.raises(ConfigError) as no:
            claimed("/runs/mine")
        assert f"process {holder.pid} on " in str(no.value)
        assert "/runs/other" in str(no.value)
        assert "groups.theirs.engine.takeover to true" in str(no.value)
        assert no.value.setting == "groups.theirs.engine.takeover"
        holder.send_signal(signal.SIGKILL)
        holder.wait(30)
        claimed("/runs/mine").release()
    assert not base.exists()


def test_a_takeover_has_its_own_claim_which_a_third_run_meets(
    base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with another_run(base) as holder:
        mine = claimed("/runs/mine", takeover=True)
        assert f"is taken over from process {holder.pid}" in caplog.text
        holder.kill()
        holder.wait(30)
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
            claimed("/runs/third")
        mine.release()
        claimed("/runs/third").release()


def test_the_same_group_is_no_other_run(base: Path) -> None:
    with another_run(base, "/runs/mine"):  # the process of its lost actor
        claimed("/runs/mine").release()
    lost = claimed("/runs/mine")
    mine = claimed("/runs/mine")
    lost.release()
    with pytest.raises(ConfigError):
        claimed("/runs/other")
    mine.release()
    mine.release()
    assert not base.exists()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "0.0.0.0"])
def test_an_engine_here_has_one_name_whatever_its_address(host: str) -> None:
    mine = claimed("/runs/mine")
    with pytest.raises(ConfigError, match="is in use"):
        claimed("/runs/other", Endpoint(host, 4000))
    claimed("/runs/other", Endpoint(host, 4001)).release()
    mine.release()


def test_engines_elsewhere_differ_by_their_address() -> None:
    there = claimed("/runs/mine", Endpoint("192.0.2.1", 4000))
    claimed("/runs/other").release()
    claimed("/runs/other", Endpoint("192.0.2.2", 4000)).release()
    with pytest.raises(ConfigError):
        claimed("/runs/other", Endpoint("192.0.2.1", 4000))
    there.release()


def test_a_forked_child_does_not_hold_it() -> None:
    mine = claimed("/runs/mine")
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        os.read(read, 1)  # until the parent closes its end
        os._exit(0)
    os.close(read)
    try:
        mine.release()
        claimed("/runs/other").release()
    finally:
        os.close(write)
        os.waitpid(child, 0)


def test_a_folder_of_another_user_is_not_used_and_no_reason_not_to_attach(
    base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base.mkdir(mode=0o755)
    base.chmod(0o777)
    claimed("/runs/mine").release()
    assert "whether another run uses it is not known" in caplog.text
    assert list(base.iterdir()) == []


def test_what_a_killed_run_left_is_removed_and_no_claim_of_a_living_one(base: Path) -> None:
    remove_ended()
    with another_run(base) as holder:
        remove_ended()
        with pytest.raises(ConfigError):
            claimed("/runs/mine")
        holder.kill()
        holder.wait(30)
        assert list((base / "attached").iterdir())
        remove_ended()
    assert not base.exists()
