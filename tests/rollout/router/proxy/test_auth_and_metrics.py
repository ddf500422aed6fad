"""Bearer keys, metrics and limits."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engines.protocol import EngineAccess
from rollout.router.http.engine_pool import connections_within
from tests.rollout.router.conftest import router_config
from tests.rollout.router.raw import post, response_to
from tests.rollout.router.stub_engine import Hold, hold_then_reply, reply

KEYS = router_config(client_key="tell", control_key="steer")


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", [None, "steer", "tel", "tell2", ""])
async def test_generation_needs_the_clients_key(make_bench, key):
    bench = await make_bench(reply(), config=KEYS)
    got = await bench.ask(json={}, headers={} if key is None else bearer(key))
    assert (got.status, got.headers["www-authenticate"]) == (401, "Bearer")
    assert bench.engines[0].seen == []
    assert (await bench.ask(json={}, headers=bearer("tell"))).status == 200


async def test_the_clients_key_is_not_sent_to_engines(make_bench):
    bench = await make_bench(reply(), config=KEYS)
    await bench.ask(json={}, headers=bearer("tell"))
    assert bench.engines[0].seen[0].header("authorization") == []


async def test_without_a_key_of_ours_the_engines_key_passes(make_bench):
    bench = await make_bench(reply())
    await bench.ask(json={}, headers=bearer("engine"))
    assert bench.engines[0].seen[0].header("authorization") == ["Bearer engine"]


ACCESS = EngineAccess("of-engine", "of-control", process="this-one", run="run-1")


@pytest.mark.parametrize("sent", ["engine", "of-control", None])
@pytest.mark.parametrize("config", [None, KEYS, router_config(control_key="steer")])
async def test_an_engine_with_a_key_gets_that_and_no_clients(make_bench, config, sent):
    bench = await make_bench(reply(), config=config)
    await bench.host.set_members(2, [bench.member(0, access=ACCESS)])
    headers = bearer("tell") if config is KEYS else bearer(sent) if sent else {}
    for _ in range(4):  # also where the head is known
        assert (await bench.ask(json={}, headers=headers)).status == 200
    given = [seen.header("authorization") for seen in bench.engines[0].seen]
    assert given == [["Bearer of-engine"]] * 4
    assert not any(seen.header("x-rollout-engine") for seen in bench.engines[0].seen)


async def test_each_engine_gets_its_own_key_whichever_came_first(make_bench):
    bench = await make_bench(*[reply()] * 3)
    keys = ["", "one", "two"]
    members = [bench.member(n, access=EngineAccess(key)) for n, key in enumerate(keys)]
    await bench.host.set_members(2, members)
    for _ in range(6):
        await bench.ask(json={}, headers=bearer("client"))
    given = [{*seen.header("authorization")} for one in bench.engines for seen in one.seen]
    assert given == [{"Bearer client"}] * 2 + [{"Bearer one"}] * 2 + [{"Bearer two"}] * 2


async def test_an_engine_in_the_place_of_another_gets_its_own_key(make_bench):
    bench = await make_bench(reply())
    for epoch in range(2, 5):
        access = EngineAccess(f"of-{epoch}", f"steers-{epoch}")
        await bench.host.set_members(epoch, [bench.member(0, access=access)])
        await bench.ask(json={})
        await bench.ask("/model_info", "GET")
    given = [seen.header("authorization") for seen in bench.engines[0].seen]
    assert given == [[f"Bearer of-{epoch}"] for epoch in (2, 2, 3, 3, 4, 4)]


async def test_an_abort_has_the_control_key_and_names_the_process(make_bench):
    bench = await make_bench(reply(b""))
    await bench.host.set_members(2, [bench.member(0, access=ACCESS)])
    assert (await bench.ask("/abort_request", json={"abort_all": True})).status == 200
    (seen,) = bench.engines[0].seen
    assert seen.header("authorization") == ["Bearer of-control"]
    assert seen.header("x-rollout-engine") == ["run-1/this-one"]


async def test_loads_of_an_engine_come_through_the_router_with_the_engines_key(make_bench):
    bench = await make_bench(reply(b"{}"), None, config=KEYS)
    members = [bench.member(n, access=ACCESS, kind=kind) for n, kind in enumerate(("vllm", "fake"))]
    await bench.host.set_members(2, members)
    assert (await bench.ask("/engines/e-0/loads", "GET", headers=bearer("tell"))).status == 401
    given = await bench.ask("/engines/e-0/loads", "GET", headers=bearer("steer"))
    assert (given.status, given.body) == (200, b"{}")
    (seen,) = bench.engines[0].seen
    assert (seen.target, seen.header("authorization")) == ("/metrics", ["Bearer of-engine"])
    for name, status in (("e-1", 502), ("e-2", 404), ("..%2Fgenerate", 404)):
        got = await bench.ask(f"/engines/{name}/loads", "GET", headers=bearer("steer"))
        assert got.status == status
    assert len(bench.engines[0].seen) == 1


@pytest.mark.parametrize("path", ["/engines", "/workers", "/metrics"])
async def test_what_the_router_shows_has_no_key_of_an_engine(make_bench, path):
    bench = await make_bench(reply())
    await bench.host.set_members(2, [bench.member(0, access=ACCESS)])
    shown = (await bench.ask(path, "GET")).body.decode()
    assert "of-engine" not in shown
    assert "of-control" not in shown


@pytest.mark.parametrize("path", ["/v1/models", "/model_info", "/get_model_info"])
@pytest.mark.parametrize(("key", "status"), [("tell", 200), ("steer", 200), ("x", 401), ("", 401)])
async def test_either_key_is_enough_to_look_at_the_model(make_bench, path, key, status):
    bench = await make_bench(reply(), config=KEYS)
    assert (await bench.ask(path, "GET", headers=bearer(key))).status == status


async def test_a_control_key_alone_is_not_sent_to_engines(make_bench):
    bench = await make_bench(reply(), config=router_config(control_key="steer"))
    await bench.ask(json={}, headers=bearer("steer"))
    await bench.ask(json={}, headers=bearer("engine"))
    given = [seen.header("authorization") for seen in bench.engines[0].seen]
    assert given == [[], ["Bearer engine"]]


@pytest.mark.parametrize("path", ["/engines", "/workers", "/metrics", "/sessions/s", "/docs"])
async def test_looking_needs_the_control_key(make_bench, path):
    bench = await make_bench(reply(), config=KEYS)
    assert (await bench.ask(path, "GET", headers=bearer("tell"))).status == 401
    assert (await bench.ask(path, "GET", headers=bearer("steer"))).status != 401


async def test_aborting_needs_the_control_key(make_bench):
    bench = await make_bench(reply(b""), config=KEYS)
    body = {"rid": "p"}
    assert (await bench.ask("/abort_request", json=body, headers=bearer("tell"))).status == 401
    assert (await bench.ask("/abort_request", json=body, headers=bearer("steer"))).status == 200


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_health_needs_no_key(make_bench, path):
    bench = await make_bench(reply(), config=KEYS)
    assert (await bench.ask(path, "GET")).status == 200


async def test_two_keys_at_once_are_refused(make_bench):
    bench = await make_bench(reply(), config=KEYS)
    twice = b"Authorization: Bearer tell\r\nAuthorization: Bearer x\r\nConnection: close\r\n"
    assert (await response_to(bench, post(b"{}", extra=twice))).startswith(b"HTTP/1.1 401")


async def metrics(bench):
    text = (await bench.ask("/metrics", "GET")).body.decode()
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_count_what_runs_what_ended_and_how_long_it_took(make_bench):
    hold = Hold()
    bench = await make_bench(None, hold_then_reply(hold))
    pending = bench.begin()
    await hold.entered.wait()
    during = await metrics(bench)
    assert during["router_in_flight", "e-1", "serving"] == 1
    assert during["router_in_flight", "dead", "e-0"] == 0
    hold.opened.set()
    await pending
    after = await metrics(bench)
    assert after["router_in_flight", "e-1", "serving"] == 0
    assert after["router_retried_total",] == 1
    assert after["router_engine_failures_total", "e-0"] == 1
    assert after["router_request_seconds_count", "/generate", "e-1"] == 1
    assert after["router_request_seconds_bucket", "+Inf", "/generate", "e-1"] == 1
    assert after["router_gate_seconds_total", "open"] > 0


async def test_paths_that_are_no_completions_share_a_label(make_bench):
    bench = await make_bench(reply())
    for path in ("score", "rerank", "embeddings", "tokenize", "responses"):
        await bench.ask(f"/v1/{path}")
    assert (await metrics(bench))["router_request_seconds_count", "e-0", "other"] == 5


@pytest.mark.parametrize(
    ("wanted", "soft", "hard", "expected"),
    [
        (100, 1024, 4096, (1024, (100, 796))),
        (1000, 1024, 4096, (2128, (1000, 1000))),
        (16384, 1024, 4096, (4096, (1984, 1984))),
        (10, 64, 64, (64, (1, 1))),
    ],
)
def test_connections_fit_into_the_limit_of_open_files(wanted, soft, hard, expected):
    assert connections_within(wanted, soft, hard) == expected


SITES = [
    (b"Host: localhost:8000", 200),
    (b"Host: 127.0.0.1", 200),
    (b"Host: [::1]:80", 200),
    (b"Host: evil.example", 403),
    (b"Host: 127.0.0.1.evil.example", 403),
    (b"Host: localhost:8000\r\nOrigin: http://evil.example", 403),
    (b"Host: localhost:8000\r\nOrigin: null", 403),
    (b"Host: localhost:8000\r\nOrigin: http://localhost:8001", 403),
    (b"Host: localhost:8000\r\nOrigin: http://localhost:8000", 200),
]


@pytest.mark.parametrize("path", [b"/abort_request", b"/generate"])
@pytest.mark.parametrize(("lines", "status"), SITES)
async def test_without_keys_no_page_of_another_site_gets_through(make_bench, path, lines, status):
    """What a browser sends by itself: a form's post, and a name that leads to this machine."""
    bench = await make_bench(reply())
    head = b"POST %s HTTP/1.1\r\n%s\r\nContent-Type: text/plain\r\nContent-Length: 19\r\n"
    message = head % (path, lines) + b'Connection: close\r\n\r\n{"abort_all": true} '
    for _ in range(3):  # also as a head that was read before
        whole = await response_to(bench, message)
        assert whole.startswith(b"HTTP/1.1 %d" % status), whole
    assert bool(bench.engines[0].seen) == (status == 200)


@pytest.mark.parametrize(("lines", "status"), SITES)
async def test_with_a_key_the_key_decides(make_bench, lines, status):
    bench = await make_bench(reply(), config=router_config(client_key="key"))
    head = b"GET /engines HTTP/1.1\r\n%s\r\nAuthorization: Bearer key\r\nConnection: close\r\n"
    assert (await response_to(bench, head % lines + b"\r\n")).startswith(b"HTTP/1.1 200")


async def test_a_health_check_may_use_any_name(make_bench):
    bench = await make_bench(reply())
    head = b"GET /health HTTP/1.1\r\nHost: pod-7.example\r\nConnection: close\r\n\r\n"
    assert (await response_to(bench, head)).startswith(b"HTTP/1.1 200")
