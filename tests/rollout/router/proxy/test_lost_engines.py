from rollout.router.proxy.lost_engines import LostEngines


def test_only_the_first_engine_that_a_request_loses_leaves_routing_by_it():
    lost = LostEngines()
    assert [lost.add(was_sent=True, has_tokens=True) for _ in range(3)] == [True, False, False]
    assert not lost.why_not_again


def test_an_engine_that_cannot_be_connected_to_always_leaves_routing():
    lost = LostEngines()
    assert all(lost.add(was_sent=False, has_tokens=False) for _ in range(3))
    assert lost.add(was_sent=True, has_tokens=False)
    assert not lost.why_not_again


def test_three_engines_in_a_row_without_a_token_may_be_the_requests_fault():
    lost = LostEngines()
    for has_tokens in (False, False, True, False, False):
        lost.add(was_sent=True, has_tokens=has_tokens)
        assert not lost.why_not_again
    lost.add(was_sent=True, has_tokens=False)
    assert "3 engines in a row" in lost.why_not_again


def test_aborts_in_a_row_with_an_open_gate_and_no_token_have_another_reason():
    lost = LostEngines()
    for is_open, num_kept, may in [(True, 0, True), (True, 0, True), (True, 0, False)]:
        assert lost.may_be_aborted(2, is_open=is_open, num_kept=num_kept) is may
        lost.add_abort(is_open=is_open, num_kept=num_kept)
    assert lost.may_be_aborted(2, is_open=False, num_kept=0)
    assert lost.may_be_aborted(2, is_open=True, num_kept=5)
