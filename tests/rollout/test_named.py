"""What others can name, and that is kept: bounded in bytes, whatever its length and number.

Each row of ``NAMED`` gets one value of 1 MiB, and 20 000 values of 1 kB; what is kept of them is
measured against the row's bound.
"""

from __future__ import annotations

import ast
import asyncio
import gc
import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import finalize

import pytest

from engines.protocol import Endpoint, FinishReason
from engines.protocol.plain_text import one_line
from rollout.agents.turns.store import SessionStore
from rollout.core.samples import Sample, SampleGroup
from rollout.driver.logprobs.gap_figures import BUCKET_NAMES
from rollout.driver.stream.audit import Auditor
from rollout.driver.stream.delivery import check_rejections
from rollout.driver.stream.hooks import Hooks, why_dropped
from rollout.driver.stream.step_metrics import StepStats, step_metrics
from rollout.observability.page.prometheus import MetricCounters, render_metrics
from rollout.observability.page.run_history import RunHistory
from rollout.observability.timeline.recorder import Timeline
from rollout.observability.timeline.span import Kind
from rollout.router.http.head_cache import HeadCache, RequestHead, head_key, kept_affinity
from rollout.router.http.routes import route_of
from rollout.router.proxy.figures import Latencies, StepMetrics
from rollout.rules.load_balancing import Affinity
from rollout.rules.routing import Backend, Hint, InFlight
from tests.support.agent_turns import one_turn, store_in

ROUTER = Path(__file__).parents[2] / "rollout" / "router"
OF_CLIENTS = {
    "affinity",
    "body",
    "headers",
    "host",
    "query",
    "rid",
    "rids",
    "session_id",
    "target",
    "url_path",
}
"""What clients choose, by its name in the router's code."""
SAFE = {"describe", "first_line", "one_line", "shortened", "value_text"}
MANY, LONG = 20_000, 1 << 20
MIB = 1 << 20
HERE = Endpoint("127.0.0.1", 1)
STOP = FinishReason("stop", 2)


@dataclass
class Named:
    """Something that others name.

    Attributes:
        by: who names what.
        make: what keeps it, and how that is given one value.
        most_bytes: that it may keep, in memory.
    """

    by: str
    make: Callable[[], tuple[object, Callable[[str], object]]]
    most_bytes: int


class Sessions:
    """A store in a folder of its own, and the loop that it is used on."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory()
        self._loop = asyncio.new_event_loop()
        self.store = store_in(Path(self._folder.name))
        finalize(self, _end, self.store, self._loop, self._folder)

    def take_turn(self, session_id: str, **more: Any) -> None:
        if not self.store.why_full(session_id, 0.0):
            self._loop.run_until_complete(one_turn(self.store, session_id, **more))

    def close(self, session_id: str) -> None:
        self._loop.run_until_complete(self.store.close(session_id))


def _end(
    store: SessionStore, loop: asyncio.AbstractEventLoop, folder: TemporaryDirectory[str]
) -> None:
    store.stop()
    loop.close()
    folder.cleanup()


def deleted_ids() -> tuple[object, Callable[[str], object]]:
    sessions = Sessions()
    return sessions, sessions.close


def closed_ids() -> tuple[object, Callable[[str], object]]:
    sessions = Sessions()

    def close(session_id: str) -> None:
        sessions.take_turn(session_id)
        sessions.close(session_id)

    return sessions, close


def session_ids() -> tuple[object, Callable[[str], object]]:
    sessions = Sessions()
    # The route lets no longer one in.
    return sessions, lambda value: sessions.take_turn(value[:200])


def stop_strings() -> tuple[object, Callable[[str], object]]:
    sessions = Sessions()
    return sessions, lambda value: sessions.take_turn("s", finish=FinishReason("stop", value))


def engine_versions() -> tuple[object, Callable[[str], object]]:
    sessions = Sessions()
    return sessions, lambda value: sessions.take_turn("s", version=value)


def affinities() -> tuple[object, Callable[[str], object]]:
    policy, in_flight = Affinity(), InFlight[Any]()
    (candidates,) = in_flight.offer([Backend("e-0", HERE)])

    def choose(value: str) -> None:
        for text in (value, value[:250]):
            policy.choose(candidates, Hint(kept_affinity(text)))

    return policy, choose


def heads() -> tuple[object, Callable[[str], object]]:
    cache: HeadCache[RequestHead] = HeadCache()

    def come(value: str) -> None:
        line = b"x-%s: %s" % (value[:100].encode(), value.encode())
        data = b"POST /v1/score HTTP/1.1\r\nContent-Length: 1\r\n%s\r\n\r\n" % line
        for _ in range(3):
            headers = [(b"x-" + value[:100].encode(), value.encode())]
            cache.add(head_key(data)[0], RequestHead(b"POST", route_of(b"/v1/score"), headers), [])

    return cache, come


def targets() -> tuple[object, Callable[[str], object]]:
    latencies = Latencies()

    def observe(value: str) -> None:
        latencies.observe(route_of(b"/" + value.encode()).path, "e-0", 0.1)

    return latencies, observe


def reports(keep: Callable[[Any], None]) -> Callable[[str], None]:
    """Reports to the router's page, with a value in each place that has a name."""

    def put(value: str) -> None:
        cut = value[:200]
        gap = {cut: dict.fromkeys((*BUCKET_NAMES, "sum"), 1)}
        for metrics, gaps in (({value: 1.0}, {}), ({}, {value: {}}), ({cut: 1.0}, gap)):
            report = {"step": 1, "metrics": metrics, "logprob_gaps": gaps}
            with suppress(ValueError):
                keep(json.loads(json.dumps(report)))

    return put


def reports_in_router() -> tuple[object, Callable[[str], object]]:
    kept = StepMetrics()

    def keep(report: Any) -> None:
        # As many numbers as fit into a request.
        report["lengths"] = {f"{number:x}": number for number in range(500)}
        gaps = {f"e-{engine}": dict(report["lengths"]) for engine in range(24)}
        report["logprob_gaps"] |= gaps
        kept.put(report, len(json.dumps(report)))

    few = iter(range(15))  # three reports each; 32 are kept
    put = reports(keep)
    return kept, lambda value: put(value) if next(few, None) is not None else None


def router_to(history: RunHistory) -> Callable[[Any], None]:
    kept = StepMetrics()

    def keep(report: Any) -> None:
        kept.put(report, len(json.dumps(report)))
        history.take_figures(kept.last()[-1:])

    return keep


def reports_on_page() -> tuple[object, Callable[[str], object]]:
    history, few = RunHistory(), iter(range(3000))  # three reports each; 5 000 are kept
    put = reports(router_to(history))
    return history, lambda value: put(value) if next(few, None) is not None else None


def large_reports_on_page() -> tuple[object, Callable[[str], object]]:
    history = RunHistory()
    keep, few = router_to(history), iter(range(1500))

    def put(value: str) -> None:
        if (number := next(few, None)) is not None:
            keep({"step": 1, "metrics": {f"{number}-{place}": 1.5 for place in range(500)}})

    return history, put


def events() -> tuple[object, Callable[[str], object]]:
    timeline, history = Timeline("s", capacity=1000), RunHistory()

    def record(value: str) -> None:
        timeline.event("fenced", value, engine_id="e-0")
        with suppress(ValueError), timeline.span(Kind.ENGINE, "pause", engine_id="e-0"):
            raise ValueError(value)
        history.take_spans([*timeline.since().spans[-2:]])

    return (timeline, history), record


def reasons() -> tuple[object, Callable[[str], object]]:
    stats, auditor = StepStats(), Auditor()
    serial = iter(range(MANY + 1))

    def drop(value: str) -> None:
        group = SampleGroup(0, [Sample([1])])
        why = why_dropped(Hooks(group_filter=lambda group: value), group, lambda *failure: None)
        stats.rejected[why] += 1
        auditor.drop(next(serial), why)

    return (stats, auditor), drop


# A closed id: a digest of 16 bytes and the entry.  Kept for each of 20 000 dropped groups: the
# number and its reason, in two tables.
NAMED = [
    Named("a client deletes sessions that there are not", deleted_ids, 1 * MIB),
    Named("a client closes sessions", closed_ids, 10_000 * 400),
    Named("a client begins sessions", session_ids, 64 * MIB),
    Named("a client stops at strings", stop_strings, 68 * MIB),
    Named("an engine names its versions", engine_versions, 68 * MIB),
    Named("a client names what prefers one engine", affinities, 20_000 * 800),
    Named("a client sends headers", heads, 24 * MIB),
    Named("a client requests paths", targets, 2 * MIB),
    Named("a client reports figures to the router", reports_in_router, 90 * MIB),
    Named("a client reports figures to the page", reports_on_page, 80 * MIB),
    Named("a client reports many figures to the page", large_reports_on_page, 80 * MIB),
    Named("an engine fails with texts", events, MANY * 2 * 1000),
    Named("a filter gives reasons", reasons, 20_000 * 500),
]


@pytest.fixture
def traced() -> Iterator[Callable[[], int]]:
    tracemalloc.start()

    def now() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    yield now
    tracemalloc.stop()


def many_values() -> Iterator[str]:
    return (f"{number:06d}{'v' * 994}" for number in range(MANY))


@pytest.mark.slow
@pytest.mark.parametrize("row", NAMED, ids=lambda row: row.by)
def test_what_is_kept_of_many_values_is_bounded(row: Named, traced: Callable[[], int]) -> None:
    kept, give = row.make()
    before = traced()
    for value in many_values():
        give(value)
    grown = traced() - before
    assert grown <= row.most_bytes, f"{grown / MIB:.1f} MiB"
    assert kept is not None


@pytest.mark.parametrize("row", NAMED, ids=lambda row: row.by)
def test_what_is_kept_of_a_long_value_is_short(row: Named, traced: Callable[[], int]) -> None:
    kept, give = row.make()
    give("first")
    before = traced()
    for number in range(8):
        give(f"{number}" + "v" * LONG)
    grown = traced() - before
    # What is counted by its bytes may be kept; the store's bound ends it.
    most = row.most_bytes if row.make in (stop_strings, engine_versions) else 4 * MIB
    assert grown <= most, f"{grown / MIB:.1f} MiB"
    assert kept is not None


@pytest.mark.parametrize("make", [stop_strings, engine_versions, session_ids])
def test_the_bytes_of_sessions_count_what_others_have_named_in_them(
    make: Callable[[], tuple[Any, Callable[[str], object]]], traced: Callable[[], int]
) -> None:
    sessions, give = make()
    before = traced()
    for number in range(300):
        give(f"{number:04d}" + "\N{PILE OF POO}" * 252)
    assert 300 * 1000 < traced() - before <= sessions.store.num_bytes


def test_engines_that_are_named_in_reports_have_a_bounded_number_of_labels() -> None:
    counters = MetricCounters()
    gap = dict.fromkeys((*BUCKET_NAMES, "sum"), 1)
    for _ in range(2):
        for number in range(3000):
            counters.take_logprob_gaps({f"engine-{number}": gap})
    assert len(counters.logprob_gaps) == 1001
    assert counters.logprob_gaps["engine-7"]["sum"] == 2
    assert counters.logprob_gaps["other"]["sum"] == 4000


def test_the_share_of_right_drafts_is_a_gauge_of_each_engine_that_knows_it() -> None:
    def engine(name: str, drafts: dict[str, Any] | None) -> dict[str, Any]:
        values = {"state": "serving", "weight_version": 1, "resident_bytes": 1, "gpus": []}
        return {"engine_id": name, "drafts": drafts, **values}

    engines = [engine("a", {"share": 0.25}), engine("b", {"share": None}), engine("c", None)]
    text = render_metrics(MetricCounters(), {"server": "s", "engines": engines})
    lines = [line for line in text.splitlines() if line.startswith("rollout_engine_draft")]
    assert lines == ['rollout_engine_draft_accepted_ratio{engine="a",server="s"} 0.25']


def test_figures_of_a_step_have_a_bounded_number_of_labels() -> None:
    reports = [
        {"step": 3, "metrics": {f"figure-{report}-{number}": 1 for number in range(500)}}
        for report in range(10)
    ]
    text = render_metrics(MetricCounters(), {"server": "s", "figures": reports})
    lines = [line for line in text.splitlines() if line.startswith("rollout_driver_figure{")]
    assert len(lines) == 1001
    assert lines[-1].endswith(" 4000.0")
    assert 'figure="other"' in lines[-1]


def test_the_reasons_of_filters_are_few_short_and_of_one_line() -> None:
    stats = StepStats()
    for number in range(2000):
        value = f"too long: {number if number > 99 else 7}\n{'x' * 5000}"
        group = SampleGroup(0, [Sample([1])])
        stats.rejected[
            why_dropped(
                Hooks(group_filter=lambda group, value=value: value), group, lambda *failure: None
            )
        ] += 1
    metrics = step_metrics([], stats)
    named = {name: value for name, value in metrics.items() if "/rejected/" in name}
    assert len(named) == 33
    assert named["rollout/rejected/other"] == 2000 - 100 - 31
    assert sum(named.values()) == metrics["rollout/rejected_groups"] == 2000
    assert all(len(name) < 200 and name.isprintable() for name in named)
    StepMetrics().put({"step": 1, "metrics": metrics}, 1)
    with pytest.raises(Exception, match="other: 1869") as failed:
        check_rejections(stats.rejected, 5, num_accepted=1, num_wanted=2)
    assert len(str(failed.value)) < 4000


def test_a_text_of_others_is_one_short_line_in_a_log() -> None:
    assert one_line("rid-1") == "rid-1"
    assert one_line("a\r\nERROR forged\x1b[2J\u2028\ud800") == (
        r"a\r\nERROR forged\x1b[2J\u2028\ud800"
    )
    assert len(one_line("\n" * LONG)) == 80


def test_the_router_logs_no_text_of_clients_as_it_is() -> None:
    """By names in the source: what a client has chosen passes a function that cuts it."""
    found = []
    for file in sorted(ROUTER.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and _is_log(node.func):
                values = [*node.args, *(keyword.value for keyword in node.keywords)]
                found += [f"{file.name}:{node.lineno}" for value in values if _is_raw(value)]
    assert found == []
    assert _is_raw(ast.parse("f'{request.rid}'", mode="eval").body)
    assert not _is_raw(ast.parse("f'{one_line(request.rid)}'", mode="eval").body)


def _is_log(called: ast.expr) -> bool:
    name = called.value if isinstance(called, ast.Attribute) else called
    return isinstance(name, ast.Name) and name.id in ("logger", "log_router_error")


def _is_raw(value: ast.AST) -> bool:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in SAFE:
        return False
    name = getattr(value, "attr", getattr(value, "id", ""))
    return name in OF_CLIENTS or any(map(_is_raw, ast.iter_child_nodes(value)))
