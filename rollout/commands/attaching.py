"""``rollout attach``: what a run whose driver has crashed has left, and what to do with it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from rollout.commands.output import AsJson, console, gib, print_json
from rollout.errors import ConfigError
from rollout.journal import read
from rollout.reconciling import (
    EngineFound,
    Found,
    Remains,
    adopt,
    clean_up,
    is_stale,
    look,
    why_not_usable,
)
from rollout.run_folder import JOURNAL_FILE

Run = Annotated[str, typer.Argument(help="The run: its folder, or its id under ./runs.")]


def attach(
    run: Run,
    clean: Annotated[
        bool, typer.Option("--clean-up", help="End what is left of engines the run has launched.")
    ] = False,
    use: Annotated[
        bool, typer.Option("--adopt", help="Let engines that can be used take requests again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a run whose driver has crashed has left, and end or adopt it.

    Engines end with the process that launched them, so mostly nothing is left but engines that
    were attached.  Nothing is changed without --clean-up or --adopt, and nothing at all while the
    driver runs.
    """
    if clean and use:
        raise ConfigError("--clean-up ends engines and --adopt uses them; give one of them")
    asyncio.run(_attach(journals_of(run), clean=clean, use=use, as_json=as_json))


async def _attach(paths: list[Path], *, clean: bool, use: bool, as_json: bool) -> None:
    records = [read(path) for path in paths]
    found = [await look(record) for record in records]
    ended: list[str] = []
    adopted: list[EngineFound] = []
    if clean:
        ended = await clean_up(found)
    if use:
        adopted = await adopt(found)
    if clean or use:
        found = [await look(record) for record in records]
    if as_json:
        print_json(
            {
                "servers": [_told(one) for one in found],
                "ended": ended,
                "adopted": [one.entry.url for one in adopted],
            }
        )
        return
    for one in found:
        _show(one)
    if clean:
        _say(f"ended: {', '.join(ended)}" if ended else "there was nothing to end")
    if use:
        _show_adopted(adopted)


def journals_of(run: str) -> list[Path]:
    """The journals of a run.

    Raises:
        ConfigError: there are none; the message says where was looked.
    """
    folders = [Path(run), Path("runs") / run]
    for folder in folders:
        for pattern in (JOURNAL_FILE, f"*/{JOURNAL_FILE}"):
            if files := sorted(folder.glob(pattern)):
                return files
    raise ConfigError(
        f"no {JOURNAL_FILE} in {' or '.join(map(str, folders))}; give the folder of a run, "
        "<log_dir>/<run_id>"
    )


def _say(text: str) -> None:
    """In words: not wrapped, and what is in brackets is no markup."""
    console().print(text, soft_wrap=True, markup=False, highlight=False)


def _show(found: Found) -> None:
    record = found.record
    age_s = max(0.0, time.time() - record.written_at_s)
    phases = ", ".join(f"{group} {phase}" for group, phase in record.phases.items())
    _say(f"server {record.server} of run {record.run_id}, launched by {record.backend}:")
    _say(f"  driver: process {record.driver.pid} on {record.driver.host}: {found.driver.value}")
    if is_stale(record):
        _say("  this journal is stale: the machine was restarted since")
    if record.is_ended:
        _say("  it was stopped in order; nothing is left of it")
        return
    doing = f", in the middle of {record.doing}" if record.doing else ""
    _say(
        f"  last heard of {age_s:.0f} s ago: {phases or 'starting'}{doing}; gate {record.gate}, "
        f"weight version {record.weight_version}"
    )
    table = Table("engine", "url", "process", "memory", "now", "weight version", "usable")
    for one in found.engines:
        why_not = _why_not(found, one)
        table.add_row(
            *map(
                escape,
                (
                    one.entry.engine_id,
                    one.entry.url,
                    one.remains.value,
                    gib(one.resident_bytes) if one.pids else "-",
                    one.says,
                    one.weight_version or "-",
                    why_not or "yes",
                ),
            )
        )
    console().print(table)
    if found.driver is Remains.RUNS:
        _say("  its driver runs: nothing is to be done here")


def _why_not(found: Found, engine: EngineFound) -> str:
    if engine.remains not in (Remains.RUNS, Remains.NOT_OURS):
        return "no"
    why_not = why_not_usable(found.record, engine)
    return f"no: {why_not}" if why_not else ""


def _show_adopted(adopted: list[EngineFound]) -> None:
    if not adopted:
        _say("no engine can be adopted")
        return
    urls = ", ".join(one.entry.url for one in adopted)
    _say("these engines take requests; a new run drives them with")
    _say(f"  engine: {{kind: attached, urls: [{urls}]}}")


def _told(found: Found) -> dict[str, Any]:
    record = asdict(found.record)
    record.pop("engines")
    return {
        **record,
        "driver_is": found.driver.value,
        "is_stale": is_stale(found.record),
        "engines": [
            {
                "engine_id": one.entry.engine_id,
                "group": one.entry.group,
                "url": one.entry.url,
                "process": one.remains.value,
                "pids": list(one.pids),
                "resident_bytes": one.resident_bytes,
                "says": one.says,
                "is_ready": one.is_ready,
                "weight_version": one.weight_version,
                "why_not_usable": _why_not(found, one),
            }
            for one in found.engines
        ],
    }
