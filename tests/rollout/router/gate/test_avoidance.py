from rollout.router.gate.avoidance import AVOIDED_S, MOST_IN_A_ROW, ErrorSeries


def test_an_engine_is_avoided_for_a_while_after_some_errors_and_again_after_one_more():
    series = ErrorSeries()
    assert [series.add(100.0) for _ in range(MOST_IN_A_ROW)] == [False] * (MOST_IN_A_ROW - 1) + [
        True
    ]
    assert series.is_avoided(100.0 + AVOIDED_S - 0.1)
    assert not series.is_avoided(100.0 + AVOIDED_S)
    assert series.add(200.0)
    assert series.is_avoided(200.0)


def test_late_errors_of_an_avoided_engine_do_not_make_it_longer():
    series = ErrorSeries()
    for _ in range(MOST_IN_A_ROW):
        series.add(100.0)
    assert not series.add(101.0)
    assert not series.is_avoided(100.0 + AVOIDED_S)
