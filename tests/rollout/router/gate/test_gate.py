import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol import Endpoint
from rollout.router.gate.aborts import AbortOrder
from rollout.router.gate.avoidance import AVOIDED_S, MOST_IN_A_ROW
from rollout.router.gate.gate import Admission, Gate, GateState, Refusal, Waiter
from rollout.rules.routing import NO_HINT, Backend, BackendState

OPEN, HOLDING, CLOSED = GateState.OPEN, GateState.HOLDING, GateState.CLOSED


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def member(engine_id: str, state: BackendState = BackendState.SERVING, **fields) -> Backend:
    return Backend(engine_id, Endpoint("127.0.0.1", 9000), state, **fields)


def gate_with(*engine_ids: str, state: GateState = OPEN, **options) -> Gate:
    gate = Gate(**options)
    gate.set_members(1, [member(engine_id) for engine_id in engine_ids])
    gate.set_state(state, weight_version=7)
    return gate


def park(gate: Gate, heard: list, **ask) -> Waiter:
    waiter = gate.enter(**ask)
    assert isinstance(waiter, Waiter)
    waiter.on_decision = lambda decision: heard.append((waiter.rid, decision))
    return waiter


@pytest.mark.parametrize(
    ("state", "kind"), [(OPEN, Admission), (HOLDING, Waiter), (CLOSED, Refusal)]
)
def test_open_admits_holding_parks_and_closed_refuses(state, kind):
    assert isinstance(gate_with("a", state=state).enter(), kind)


def test_a_new_gate_is_closed_and_reports_it():
    refusal = Gate().enter()
    assert isinstance(refusal, Refusal)
    assert (refusal.gate, refusal.reason) == (CLOSED, "the router has just started")


def test_a_refusal_carries_reason_phase_and_retry_time():
    gate = gate_with("a")
    gate.set_state(CLOSED, reason="update failed on a", phase="offloaded")
    refusal = gate.enter()
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.phase) == ("update failed on a", "offloaded")
    assert (refusal.needs_push, gate.stats()["gate"]["needs_push"]) == (None, None)
    gate.set_state(CLOSED, reason="version 7 is expected", needs_push=7)
    refusal = gate.enter()
    assert isinstance(refusal, Refusal)
    assert (refusal.needs_push, gate.stats()["gate"]["needs_push"]) == (7, 7)
    gate.set_state(HOLDING, reason="a push")
    assert gate.stats()["gate"]["needs_push"] is None
    assert refusal.retry_after_s > 0


def test_an_open_gate_without_a_serving_engine_refuses_and_names_why():
    gate = gate_with()
    gate.set_members(
        2,
        [
            member("a", BackendState.FENCED, reason="wrong checksum"),
            member("b", BackendState.ASLEEP),
        ],
    )
    refusal = gate.enter()
    assert isinstance(refusal, Refusal)
    assert "a is fenced (wrong checksum); b is asleep" in refusal.message
    assert not gate.is_ready


@pytest.mark.parametrize("state", [s for s in BackendState if s is not BackendState.SERVING])
def test_only_serving_engines_are_chosen(state):
    gate = gate_with()
    gate.set_members(2, [member("a", state), member("b")])
    chosen = {gate.enter().member.engine_id for _ in range(4)}
    assert chosen == {"b"}


def test_waiters_are_released_in_order_of_arrival_with_the_new_weight_version():
    gate, heard = gate_with("a", state=HOLDING), []
    for rid in ("first", "second", "third"):
        park(gate, heard, rid=rid)
    gate.set_state(OPEN, weight_version=8)
    assert [rid for rid, _ in heard] == ["first", "second", "third"]
    assert {decision.weight_version for _, decision in heard} == {8}
    assert (gate.num_held, len(gate.in_flight)) == (0, 3)


def test_opening_without_a_version_keeps_the_current_one():
    gate = gate_with("a")
    gate.set_state(HOLDING)
    gate.set_state(OPEN)
    assert gate.enter().weight_version == 7


def test_closing_refuses_held_requests():
    gate, heard = gate_with("a", state=HOLDING), []
    park(gate, heard)
    gate.set_state(CLOSED, reason="offload failed", phase="paused")
    (_, refusal), *more = heard
    assert (refusal.reason, refusal.phase, more) == ("offload failed", "paused", [])


def test_opening_without_an_engine_refuses_held_requests():
    gate, heard = gate_with(state=HOLDING), []
    park(gate, heard)
    gate.set_state(OPEN)
    assert "has no engines" in heard[0][1].message


def test_a_waiter_whose_client_left_is_never_admitted():
    gate, heard = gate_with("a", state=HOLDING), []
    gate.leave(park(gate, heard))
    gate.set_state(OPEN)
    assert (heard, len(gate.in_flight)) == ([], 0)


def test_a_waiter_that_leaves_just_after_its_admission_releases_it():
    gate = gate_with("a", state=HOLDING)
    waiter = park(gate, [])
    gate.set_state(OPEN)
    gate.leave(waiter)
    assert len(gate.in_flight) == 0


def test_a_waiter_that_expires_learns_how_long_it_was_held_and_why():
    clock = Clock()
    gate, heard = gate_with("a", clock=clock), []
    gate.set_state(HOLDING, reason="training", phase="offloaded")
    waiter = park(gate, heard)
    clock.now_s += 600
    gate.expire(waiter)
    refusal = heard[0][1]
    assert (refusal.message, refusal.phase) == ("held for 600 s and not released", "offloaded")
    assert gate.num_held == 0


def test_a_deadline_that_comes_too_late_changes_nothing():
    gate, heard = gate_with("a", state=HOLDING), []
    waiter = park(gate, heard)
    gate.set_state(OPEN)
    gate.expire(waiter)
    assert [type(decision) for _, decision in heard] == [Admission]


def test_one_more_than_may_wait_is_refused():
    gate = gate_with("a", state=HOLDING, max_held=2)
    park(gate, [])
    second = park(gate, [])
    assert gate.enter().message == "2 requests are already held"
    gate.leave(second)
    assert isinstance(gate.enter(), Waiter)


def test_bodies_of_waiters_are_bounded_together():
    gate = gate_with("a", state=HOLDING, max_held_bytes=100)
    first = park(gate, [], num_bytes=60)
    assert "already take 60 bytes" in gate.enter(num_bytes=60).message
    gate.leave(first)
    assert isinstance(gate.enter(num_bytes=60), Waiter)


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_membership_that_is_not_newer_is_ignored(epoch):
    gate = gate_with("a")
    assert gate.set_members(epoch, []) is False
    assert gate.enter().member.engine_id == "a"


def test_a_membership_with_an_engine_twice_is_refused_and_changes_nothing():
    gate = gate_with("a")
    with pytest.raises(ValueError, match="engine b is in the set of epoch 2 twice"):
        gate.set_members(2, [member("b"), member("b")])
    assert (gate.members.epoch, gate.enter().member.engine_id) == (1, "a")


def test_an_engine_leaves_routing_at_its_first_failure_and_the_failure_is_reported():
    reports = []
    gate = gate_with("a", "b", on_failure=reports.append)
    first = gate.enter()
    gate.report_failure(first, "/generate", "connection refused")
    others = {gate.enter().member.engine_id for _ in range(4)}
    assert others == {"a", "b"} - {first.member.engine_id}
    (report,) = reports
    assert (report.engine_id, report.has_left_routing) == (first.member.engine_id, True)


def test_a_failure_that_the_request_may_have_caused_is_counted_and_the_engine_stays():
    reports = []
    gate = gate_with("a", on_failure=reports.append)
    gate.report_failure(gate.enter(), "/generate", "reset", leaves_routing=False)
    (engine,) = gate.stats()["engines"]
    assert (engine["state"], engine["num_failures"]) == ("serving", 1)
    assert [report.has_left_routing for report in reports] == [False]


def test_a_dead_engine_is_visible_with_its_reason_and_number_of_failures():
    gate = gate_with("a")
    admissions = [gate.enter(), gate.enter()]
    for admission in admissions:
        gate.report_failure(admission, "/generate", "connection reset")
        gate.leave(admission)
    (engine,) = gate.stats()["engines"]
    assert (engine["state"], engine["reason"]) == ("dead", "connection reset")
    assert (engine["num_failures"], engine["num_in_flight"]) == (2, 0)


def test_a_dead_engine_comes_back_with_a_newer_membership():
    gate = gate_with("a")
    gate.report_failure(gate.enter(), "/generate", "connection reset")
    gate.set_members(2, [member("a")])
    assert gate.enter().member.engine_id == "a"


def test_a_failure_from_before_a_restart_does_not_kill_the_restarted_engine():
    gate = gate_with("a")
    old = gate.enter()
    gate.set_members(2, [member("a", BackendState.FENCED)])
    gate.set_members(3, [member("a")])
    failure = gate.report_failure(old, "/generate", "connection reset")
    assert failure.has_left_routing is False
    assert gate.is_ready


def test_a_failure_counts_though_newer_memberships_came_while_the_engine_served_on():
    gate = gate_with("a")
    admission = gate.enter()
    gate.set_members(2, [member("a"), member("b", BackendState.ASLEEP)])
    assert gate.report_failure(admission, "/generate", "reset").has_left_routing


def test_a_second_attempt_is_never_on_the_engine_that_failed():
    gate = gate_with("a", "b")
    assert {gate.enter(excluded_engine="a").member.engine_id for _ in range(4)} == {"b"}


def test_a_failed_engine_is_passed_over_though_it_serves_again():
    gate = gate_with("a")
    assert isinstance(gate.enter(excluded_engine="a"), Refusal)
    gate.set_members(2, [member("a"), member("b")])
    gate.enter()
    assert gate.enter(excluded_engine="b").member.engine_id == "a"


def test_the_choice_goes_by_all_live_requests_whatever_membership_they_began_under():
    gate = gate_with("a", "b")
    for _ in range(4):
        gate.enter()
    gate.set_members(2, [member("a"), member("b"), member("c")])
    assert [gate.enter().member.engine_id for _ in range(2)] == ["c", "c"]


class FillOneByOne:
    wants_affinity = wants_prompt = False

    def choose(self, candidates, hint=NO_HINT):
        return max(candidates.members, key=lambda entry: candidates.load(entry.engine_id))


def test_a_custom_policy_chooses():
    gate = gate_with("a", "b", policy=FillOneByOne())
    assert [gate.enter().member.engine_id for _ in range(3)] == ["a", "a", "a"]


def test_a_request_that_ends_twice_is_counted_once():
    idle = []
    gate = gate_with("a", on_idle=lambda: idle.append(True))
    admission, other = gate.enter(), gate.enter()
    gate.leave(admission)
    gate.leave(admission)
    assert (len(gate.in_flight), idle) == (1, [])
    gate.leave(other)
    assert (len(gate.in_flight), idle) == (0, [True])


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (AbortOrder(frozenset({"p-1"})), ["p-1"]),
        (AbortOrder(frozenset({"p-1", "p-2"})), ["p-1", "p-2"]),
        (AbortOrder(frozenset({"p-", ""})), []),
        (AbortOrder(prefix="p-1"), ["p-1", "p-10"]),
        (AbortOrder(is_for_all=True), ["p-1", "p-10", "p-2", ""]),
        (AbortOrder(), []),
    ],
)
def test_an_abort_refuses_the_held_requests_that_it_names_and_no_other(order, expected):
    gate, heard = gate_with("a", state=HOLDING), []
    for rid in ("p-1", "p-10", "p-2", ""):
        park(gate, heard, rid=rid)
    assert gate.abort(order).num_held == len(expected)
    assert [(rid, decision.is_abort) for rid, decision in heard] == [
        (rid, True) for rid in expected
    ]
    assert gate.num_held == 4 - len(expected)


def admitted(gate, rid, sent_as, heard):
    admission = gate.enter(rid=rid)
    admission.sent_as, admission.on_aborted = sent_as, lambda: heard.append(rid)
    return admission


def test_an_abort_names_requests_to_their_engines_while_they_are_there():
    gate, heard = gate_with("a", "b"), []
    first, second, _ = (admitted(gate, f"p-{num}", f"e{num}", heard) for num in (1, 10, 2))
    order = AbortOrder(prefix="p-1")
    found = gate.abort(order)
    assert found.num_on_engines == 2
    assert found.engines == {
        first.member.engine_id: (first.member, ["e1"]),
        second.member.engine_id: (second.member, ["e10"]),
    }
    assert heard == ["p-1", "p-10"]
    gate.leave(first)
    assert list(gate.abort(order).engines) == [second.member.engine_id]
    gate.leave(second)
    assert gate.abort(order).engines == {}


def test_a_request_of_several_prompts_ends_with_the_last_that_is_named():
    gate, heard = gate_with("a"), []
    admission = admitted(gate, "", "", heard)
    admission.prompts = {"p": "e1", "p1": "e2"}
    assert gate.abort(AbortOrder(frozenset({"p"}))).engines == {"a": (admission.member, ["e1"])}
    assert heard == []
    assert gate.abort(AbortOrder(prefix="p")).num_on_engines == 1
    assert heard == [""]


def test_a_body_need_not_be_read_when_the_request_would_be_refused():
    gate = gate_with("a", max_held=1)
    assert gate.would_refuse() is None
    gate.set_state(HOLDING)
    assert gate.would_refuse() is None
    park(gate, [])
    assert "already held" in gate.would_refuse().message
    gate.set_state(CLOSED)
    assert gate.would_refuse().gate is CLOSED


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.integers(0, 3)),
        st.tuples(st.just("leave"), st.integers(0, 30)),
        st.tuples(st.just("expire"), st.integers(0, 30)),
        st.tuples(st.just("fail"), st.integers(0, 30)),
        st.tuples(st.just("state"), st.sampled_from(list(GateState))),
        st.tuples(st.just("members"), st.lists(st.sampled_from("abc"), unique=True)),
    ),
    max_size=60,
)


@given(EVENTS)
def test_whatever_happens_each_request_is_decided_once_and_counts_return_to_zero(events):
    gate, requests, reported, epoch = gate_with("a", "b", max_held=4), [], [], 1
    for event, what in events:
        if event == "enter":
            request = gate.enter(rid=str(what))
            if isinstance(request, Waiter):
                request.on_decision = lambda decision, waiter=request: reported.append(waiter)
            if not isinstance(request, Refusal):
                requests.append(request)
        elif event == "state":
            gate.set_state(what)
        elif event == "members":
            epoch += 1
            gate.set_members(epoch, [member(engine_id) for engine_id in what])
        elif requests:
            request = requests[what % len(requests)]
            if event == "leave":
                gate.leave(request)
            elif event == "expire" and isinstance(request, Waiter):
                gate.expire(request)
            elif event == "fail" and isinstance(request, Admission):
                gate.report_failure(request, "/generate", "reset")
        engines = [entry.engine_id for entry in gate.members if entry.is_choosable]
        stand = {
            entry: num for num, ids in gate.members.choosable.by_load().items() for entry in ids
        }
        assert stand == {entry: gate.in_flight.num(entry) for entry in engines}
        assert len(reported) == len(set(reported))
        assert gate.state is HOLDING or gate.num_held == 0
        assert gate.num_held <= 4
    for request in requests:
        gate.leave(request)
    stats = gate.stats()
    assert (stats["num_in_flight"], stats["gate"]["num_held"]) == (0, 0)
    assert stats["gate"]["held_bytes"] == 0


# -- while recovery may bring an engine back ------------------------------------------------------

RETURNS = {"may_return": True}


def lose(gate: Gate, engine_id: str) -> None:
    """A request on this engine loses its connection."""
    admission = gate.enter()
    assert isinstance(admission, Admission)
    assert admission.member.engine_id == engine_id
    gate.report_failure(admission, "POST /generate", "connection reset")
    gate.leave(admission)


def open_gate(*members: Backend, **options) -> Gate:
    gate = Gate(**options)
    gate.set_members(1, members)
    gate.set_state(OPEN, weight_version=7)
    return gate


def test_an_open_gate_holds_from_the_moment_its_last_engine_is_lost():
    gate, heard = open_gate(member("a", **RETURNS)), []
    lose(gate, "a")
    assert gate.state is HOLDING
    assert not gate.is_ready
    assert "recovery" in gate.stats()["gate"]["reason"]
    waiter = park(gate, heard, rid="r", excluded_engine="a")
    assert gate.would_refuse() is None
    gate.set_members(2, [member("a", BackendState.DEAD, **RETURNS)])
    assert heard == []
    gate.set_members(3, [member("a", **RETURNS)])
    assert gate.state is OPEN
    assert isinstance(waiter.decision, Admission)
    assert waiter.decision.weight_version == 7


def test_held_requests_are_refused_when_there_is_no_hope_left():
    gate, heard = open_gate(member("a", **RETURNS)), []
    lose(gate, "a")
    park(gate, heard, rid="r")
    gate.set_members(2, [member("a", BackendState.FENCED, reason="given up")])
    [(rid, refusal)] = heard
    assert (rid, gate.state) == ("r", OPEN)
    assert "given up" in refusal.message
    assert isinstance(gate.enter(), Refusal)


def test_the_bounds_of_holding_apply_while_recovery_works():
    gate, heard = open_gate(member("a", **RETURNS), max_held=1), []
    lose(gate, "a")
    waiter = park(gate, heard, rid="r")
    assert "already held" in gate.enter().message
    gate.expire(waiter)
    assert "not released" in heard[0][1].message


def test_one_engine_that_serves_is_enough():
    gate = open_gate(member("a"), member("b", BackendState.DEAD, **RETURNS))
    assert isinstance(gate.enter(), Admission)
    assert gate.state is OPEN


def test_requests_of_an_engine_that_is_taken_away_are_held_too():
    gate, decisions = open_gate(member("a", **RETURNS)), []
    admission = gate.enter()

    def evicted(why: str) -> None:
        gate.leave(admission)
        decisions.append(gate.enter(excluded_engine="a"))

    admission.on_evicted = evicted
    gate.set_members(2, [member("a", BackendState.FENCED, **RETURNS)])
    assert isinstance(decisions[0], Waiter)


@pytest.mark.parametrize("state", [HOLDING, CLOSED])
def test_what_the_lifecycle_has_shut_stays_as_it_is(state):
    gate = open_gate(member("a", **RETURNS))
    lose(gate, "a")
    gate.set_state(state, reason="an update", phase="pause_generation")
    assert (gate.state, gate.wanted, gate.reason) == (state, state, "an update")
    gate.set_members(2, [member("a", **RETURNS)])
    assert (gate.state, gate.reason) == (state, "an update")


def test_an_error_in_a_waiters_callback_stops_neither_the_gate_nor_the_others():
    gate = gate_with("a", state=HOLDING)
    waiters, heard = [gate.enter(rid=str(num)) for num in range(3)], []

    def fail(decision):
        raise RecursionError("too deep")

    waiters[0].on_decision = waiters[2].on_decision = heard.append
    waiters[1].on_decision = fail
    gate.set_state(OPEN)
    assert len(heard) == len(gate.in_flight) == 2


def test_an_error_as_one_request_is_evicted_does_not_keep_the_others():
    gate, evicted = gate_with("a", "b"), []
    for callback in ({}.__getitem__, evicted.append):
        gate.enter(excluded_engine="b").on_evicted = callback
    assert gate.set_members(9, [member("b")])
    assert len(evicted) == 1


# -- engines that only fail -----------------------------------------------------------------


def fail(gate: Gate, engine_id: str, num: int = MOST_IN_A_ROW) -> None:
    """So many requests on this engine get errors of its own, at once."""
    for _ in range(num):
        others = []
        while (admission := gate.enter()).member.engine_id != engine_id:
            others.append(admission)
        for one in others:
            gate.leave(one)
        gate.note_reply(admission, is_error=True)
        gate.leave(admission)


def chosen(gate: Gate, num: int = 6) -> set[str]:
    admissions = [gate.enter() for _ in range(num)]
    for one in admissions:
        gate.leave(one)
    return {one.member.engine_id for one in admissions}


def test_an_engine_that_only_fails_does_not_draw_the_requests():
    """It answers at once, so it always has the fewest."""
    gate, slow, num_failed = gate_with("a", "b"), [], 0
    for _ in range(60):
        admission = gate.enter()
        if admission.member.engine_id == "b":
            slow.append(admission)
            continue
        gate.note_reply(admission, is_error=True)
        gate.leave(admission)
        num_failed += 1
    assert num_failed == MOST_IN_A_ROW
    assert len(slow) == 60 - MOST_IN_A_ROW
    assert [one["is_avoided"] for one in gate.stats()["engines"]] == [True, False]


def test_an_avoided_engine_is_tried_again_and_one_answer_ends_it():
    clock = Clock()
    gate = gate_with("a", "b", clock=clock)
    fail(gate, "a")
    assert chosen(gate) == {"b"}
    clock.now_s += AVOIDED_S
    assert chosen(gate) == {"a", "b"}
    fail(gate, "a", 1)
    assert chosen(gate) == {"b"}
    clock.now_s += AVOIDED_S
    admission = gate.enter()
    assert admission.member.engine_id == "a"
    gate.note_reply(admission, is_error=False)
    fail(gate, "a", MOST_IN_A_ROW - 1)
    assert chosen(gate) == {"a", "b"}


def test_a_late_answer_of_an_avoided_engine_brings_it_back():
    gate = gate_with("a", "b")
    running = next(one for _ in range(2) if (one := gate.enter()).member.engine_id == "a")
    fail(gate, "a")
    assert chosen(gate) == {"b"}
    gate.note_reply(running, is_error=False)
    assert chosen(gate) == {"a", "b"}


def test_requests_that_every_engine_fails_lock_nobody_out():
    gate = gate_with("a", "b")
    fail(gate, "a")
    fail(gate, "b")
    assert chosen(gate) == {"a", "b"}
    assert gate.is_ready


def test_errors_of_one_client_between_answers_make_no_engine_avoided():
    gate = gate_with("a", "b")
    for _ in range(4 * MOST_IN_A_ROW):
        for engine_id in "ab":
            fail(gate, engine_id, MOST_IN_A_ROW - 1)
        for admission in [gate.enter(), gate.enter()]:
            gate.note_reply(admission, is_error=False)
            gate.leave(admission)
    assert not gate.members.avoided
    assert chosen(gate) == {"a", "b"}


@pytest.mark.parametrize("state", [HOLDING, CLOSED])
def test_errors_while_the_gate_is_not_open_do_not_count(state):
    gate = gate_with("a", "b")
    admissions = [gate.enter() for _ in range(4 * MOST_IN_A_ROW)]
    gate.set_state(state)
    for one in admissions:
        gate.note_reply(one, is_error=True)
    assert not gate.members.errors


def test_errors_of_before_a_restart_are_no_evidence_about_the_engine():
    gate = gate_with("a", "b")
    admissions = [gate.enter() for _ in range(4 * MOST_IN_A_ROW)]
    fail(gate, "a")
    gate.set_members(2, [member("a", BackendState.DEAD), member("b")])
    gate.set_members(3, [member("a"), member("b")])
    for one in admissions:
        if one.member.engine_id == "a":
            gate.note_reply(one, is_error=True)
    assert not gate.members.errors
    assert chosen(gate) == {"a", "b"}


def test_a_new_set_of_engines_keeps_what_is_known_of_those_that_serve_on():
    gate = gate_with("a", "b")
    fail(gate, "a")
    gate.set_members(2, [member("a"), member("b"), member("c")])
    assert chosen(gate) == {"b", "c"}


def test_a_request_may_go_to_an_avoided_engine_rather_than_to_the_one_that_it_lost():
    gate = gate_with("a", "b")
    fail(gate, "a")
    assert gate.enter(excluded_engine="b").member.engine_id == "a"


# -- decisions about many requests, some at a time -----------------------------------------------


def gate_with_loop(*engine_ids: str, **options) -> tuple[Gate, list]:
    """A gate that holds, and what it wants its event loop to call."""
    gate, calls = gate_with(*engine_ids, state=HOLDING, **options), []
    gate.call_soon = calls.append
    return gate, calls


def test_many_held_requests_are_released_some_at_a_time_in_order():
    gate, calls = gate_with_loop("a")
    heard = []
    for number in range(100):
        park(gate, heard, rid=f"{number:03}")
    gate.set_state(OPEN)
    sizes = [len(heard)]
    late = park(gate, heard, rid="late")  # it comes while others wait, so behind them
    while calls:
        calls.pop()()
        sizes.append(len(heard))
    assert 0 < sizes[0] < 100
    assert len(sizes) > 4
    assert [rid for rid, _ in heard] == [*(f"{number:03}" for number in range(100)), "late"]
    assert isinstance(late.decision, Admission)
    assert isinstance(gate.enter(), Admission)


@pytest.mark.parametrize(("state", "kind"), [(HOLDING, None), (CLOSED, Refusal)])
def test_a_gate_that_shuts_while_it_releases_admits_no_more(state, kind):
    gate, calls = gate_with_loop("a")
    heard = []
    for number in range(100):
        park(gate, heard, rid=str(number))
    gate.set_state(OPEN)
    num = len(heard)
    gate.set_state(state)
    while calls:
        calls.pop()()
    assert {type(decision) for _, decision in heard[:num]} == {Admission}
    assert {type(decision) for _, decision in heard[num:]} == ({kind} if kind else set())
    assert gate.num_held == (0 if kind else 100 - num)


def test_long_bodies_are_released_one_by_one():
    gate, calls = gate_with_loop("a")
    heard = []
    for _ in range(3):
        park(gate, heard, num_bytes=4 << 20)
    gate.set_state(OPEN)
    assert len(heard) == 1
    calls.pop()()
    assert len(heard) == 2


def test_requests_of_a_lost_engine_are_evicted_some_at_a_time():
    gate, calls = gate_with_loop("a")
    gate.set_state(OPEN)
    evicted = []
    for number in range(100):
        admission = gate.enter(rid=str(number))
        admission.on_evicted = lambda why, rid=admission.rid: evicted.append(rid)
    gate.set_members(2, [])
    num = len(evicted)
    assert 0 < num < 100
    gone = next(one for one in gate.in_flight if one.rid not in evicted)
    gone.on_evicted = None  # it ended meanwhile
    while calls:
        calls.pop()()
    assert sorted([*evicted, gone.rid], key=int) == [str(number) for number in range(100)]


def test_what_a_released_request_does_is_decided_after_it():
    """A request that loses its engine as it is sent does not decide on the next ones within it."""
    gate, heard = gate_with("a", "b", state=HOLDING), []

    def fail(decision):
        heard.append("begun")
        gate.report_failure(decision, "POST /generate", "connection reset")
        gate.leave(decision)
        park(gate, heard, rid="again", excluded_engine=decision.member.engine_id)
        heard.append("over")

    first = gate.enter()
    first.on_decision = fail
    park(gate, heard, rid="second")
    gate.set_state(OPEN)
    assert [one if isinstance(one, str) else one[0] for one in heard] == [
        *("begun", "over", "second", "again")
    ]
