"""What ``rollout attach`` prints of a run whose driver has crashed."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

from typer.testing import CliRunner

from engines.process.process_identity import identify
from engines.process.tcp_ports import reserve_port
from rollout.cli.main import app
from rollout.control.server.journal import EngineEntry, ServerJournal


def test_dead_engines_are_one_line_each(tmp_path: Path) -> None:
    own = identify(os.getpid())
    assert own is not None
    gone = replace(own, started=own.started - 1)
    with reserve_port() as reserved:
        url = f"http://127.0.0.1:{reserved.port}"
    reason = "engine main-0: pause took longer than 60 s\nits log says more"
    entries = [
        EngineEntry(f"main-{index}", "main", url, "local", 3, reason, (gone,)) for index in range(8)
    ]
    entries.append(replace(entries[7], is_asleep=True))
    journal = ServerJournal.of(tmp_path / "policy" / "journal.json", "exp", "policy", "local")
    asyncio.run(journal.write(engines=tuple(entries), phases={"main": "serving"}))
    result = CliRunner().invoke(app, ["attach", str(tmp_path)], env={"COLUMNS": "40"})
    assert result.exit_code == 0, result.output
    lines = [line.split("  ") for line in result.output.splitlines() if "main-" in line][:9]
    names = [f"main-{index}" for index in range(8)]
    assert [line[1] for line in lines] == [*names, "standby of main-7"]
    assert {tuple(line[2:]) for line in lines} == {
        (url, "process ended", "does not answer", f"fenced: {reason.splitlines()[0]}")
    }
    assert len(result.output.splitlines()) < 14
