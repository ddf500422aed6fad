"""``rollout attach``: what still exists of a run whose driver has crashed, and cleaning up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import typer

from engines.protocol.plain_text import first_line, size_text
from rollout.cli.lib.output import print_json
from rollout.config.run_dir import JOURNAL_FILE
from rollout.control.engine.claim import remove_ended
from rollout.control.server.crash_cleanup import (
    FoundEngine,
    FoundServer,
    ProcessState,
    clean_up,
    inspect,
)
from rollout.control.server.journal import JournalRecord
from rollout.control.server.runs import journals_of, named_folders
from rollout.core.errors import ConfigError, RolloutError


def print_leftovers(run: str, *, clean: bool, as_json: bool) -> None:
    """Print what the launch of a run has left, and stop its engines if ``clean``."""
    found, ended = asyncio.run(_examine(records_of(run), clean=clean))
    if as_json:
        print_json({"servers": [_as_dict(server) for server in found], "ended": ended})
        return
    for server in found:
        _show(server)
    if clean:
        typer.echo(f"stopped: {', '.join(ended)}" if ended else "there was nothing to stop")


async def _examine(
    records: Sequence[JournalRecord], *, clean: bool
) -> tuple[list[FoundServer], list[str]]:
    found = [await inspect(record) for record in records]
    if not clean:
        return found, []
    ended = await clean_up(found)
    remove_ended()
    return [await inspect(record) for record in records], ended


def records_of(run: str) -> list[JournalRecord]:
    """What the journals of a run's servers hold.

    Raises:
        ConfigError: there is none; the message names the folders.
        RolloutError: one cannot be read.
    """
    journals = journals_of(run)
    if not journals:
        folder, under_runs = named_folders(run)
        raise ConfigError(
            f"no {JOURNAL_FILE} in {folder} or {under_runs}; give the folder of a run, "
            "<log_dir>/<run_id>"
        )
    for journal in journals:
        if journal.record is None:
            raise RolloutError(journal.trouble)
    return [journal.record for journal in journals if journal.record is not None]


def _show(crashed: FoundServer) -> None:
    record = crashed.record
    age_s = max(0.0, time.time() - record.written_at_s)
    phases = ", ".join(f"{group} {phase}" for group, phase in record.phases.items())
    typer.echo(f"server {record.server} of run {record.run_id}, launched by {record.backend}:")
    typer.echo(
        f"  driver: process {record.driver.pid} on {record.driver.host}: {crashed.driver.value}"
    )
    if crashed.driver is ProcessState.EARLIER_BOOT:
        typer.echo("  this journal is stale: the machine has been restarted since")
    if record.is_ended:
        typer.echo("  it was stopped normally and has no leftovers")
        return
    doing = f", during {record.doing}" if record.doing else ""
    typer.echo(
        f"  last record {age_s:.0f} s ago: {phases or 'starting'}{doing}; gate {record.gate}, "
        f"weight version {record.weight_version}"
    )
    for engine in crashed.engines:
        typer.echo(f"  {_line(engine)}")
    if crashed.driver is ProcessState.RUNS:
        typer.echo("  its driver runs: --clean-up would be refused")


def _line(engine: FoundEngine) -> str:
    """One engine; with --json, its reply is whole."""
    is_short = engine.is_ready or engine.weight_version or engine.reply.startswith("does not")
    values = [
        ("standby of " if engine.entry.is_asleep else "") + engine.entry.engine_id,
        engine.entry.url,
        f"process {engine.state.value}",
        engine.reply if is_short else "does not answer",
    ]
    if engine.pids:
        values.append(size_text(engine.resident_bytes))
    if engine.weight_version:
        values.append(f"weight version {engine.weight_version}")
    if engine.entry.fence_reason:
        values.append(f"fenced: {first_line(engine.entry.fence_reason)}")
    return "  ".join(values)


def _as_dict(crashed: FoundServer) -> dict[str, Any]:
    return {
        **asdict(replace(crashed.record, key="")),
        "driver_is": crashed.driver.value,
        "is_stale": crashed.driver is ProcessState.EARLIER_BOOT,
        "engines": [
            {
                "engine_id": engine.entry.engine_id,
                "group": engine.entry.group,
                "is_asleep": engine.entry.is_asleep,
                "url": engine.entry.url,
                "process": engine.state.value,
                "pids": list(engine.pids),
                "resident_bytes": engine.resident_bytes,
                "says": engine.reply,
                "is_ready": engine.is_ready,
                "weight_version": engine.weight_version,
                "fence_reason": engine.entry.fence_reason,
            }
            for engine in crashed.engines
        ],
    }
