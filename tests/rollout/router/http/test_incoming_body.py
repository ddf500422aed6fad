"""Bodies on their way: how much they take, of which client, and for how long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollout.router.http.incoming_body import LEAST_BYTES_PER_S, STALLED_S, IncomingBodies


def test_a_client_has_at_most_half_and_all_have_at_most_the_bound() -> None:
    bodies = IncomingBodies(100)
    one, other = bodies.begin("a", list, 0.0), bodies.begin("b", list, 0.0)
    assert one.add(b"x" * 50, 0.0) == ""
    assert "requests of a already take 50" in one.add(b"x", 0.0)
    assert other.add(b"y" * 50, 0.0) == ""
    assert "requests already take 100" in bodies.begin("c", list, 0.0).add(b"z", 0.0)
    assert (one.take(), bodies.num_bytes) == (b"x" * 50, 50)
    assert bodies.begin("a", list, 0.0).add(b"x" * 50, 0.0) == ""


PARTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.booleans()), max_size=40)


@given(PARTS)
def test_what_is_counted_is_what_has_arrived_and_is_not_complete(parts: list[tuple]) -> None:
    bodies = IncomingBodies(200)
    live = {name: bodies.begin(name, list, 0.0) for name in "abc"}
    sent = dict.fromkeys("abc", b"")
    for name, num, is_end in parts:
        if not live[name].add(b"x" * num, 0.0):
            sent[name] += b"x" * num
        if is_end:
            assert live[name].take() == sent[name]
            live[name], sent[name] = bodies.begin(name, list, 0.0), b""
        assert bodies.num_bytes == sum(map(len, sent.values())) <= 200
    for body in live.values():
        body.drop()
        body.drop()
    assert (bodies.num_bytes, bodies._of_clients, bodies._on_late) == (0, {}, {})


def test_a_body_that_stops_and_one_that_is_slow_are_late() -> None:
    late: list[str] = []
    bodies = IncomingBodies(1 << 30)
    rates = {"steady": 2 * LEAST_BYTES_PER_S, "slow": 100, "stopped": 2 * LEAST_BYTES_PER_S}
    live = {name: bodies.begin(name, lambda name=name: late.append(name), 0.0) for name in rates}
    bodies.begin("never", lambda: late.append("never"), 0.0)
    for second in range(1, 40):
        for name, rate in rates.items():
            if name not in late and (name != "stopped" or second < 20):
                live[name].add(b"x" * rate, float(second))
        bodies.expire(float(second))
        for name in set(late) & live.keys():
            live[name].drop()
        late = list(dict.fromkeys(late))
        if second == STALLED_S:
            assert late == []
    assert sorted(late) == ["never", "slow", "stopped"]
