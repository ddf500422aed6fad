"""Several metrics pages merged into one."""

from prometheus_client.parser import text_string_to_metric_families

from rollout.observability.page.merged_metrics import merge_metrics

ENGINE = """# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="tiny, {or} not"} 3.0
# HELP sglang:e2e_seconds Latency.
# TYPE sglang:e2e_seconds histogram
sglang:e2e_seconds_bucket{le="1.0"} 2
sglang:e2e_seconds_bucket{le="+Inf"} 3
sglang:e2e_seconds_count 3
sglang:e2e_seconds_sum 2.5
"""


def families(text: str) -> dict:
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_a_family_of_two_engines_appears_once_with_the_samples_of_both() -> None:
    text = merge_metrics([({"engine": "main-0"}, ENGINE), ({"engine": "main-1"}, ENGINE)])
    assert text.count("# TYPE sglang:num_running_reqs gauge") == 1
    samples = families(text)["sglang:num_running_reqs"].samples
    assert [sample.labels for sample in samples] == [
        {"model_name": "tiny, {or} not", "engine": "main-0"},
        {"model_name": "tiny, {or} not", "engine": "main-1"},
    ]


def test_a_histogram_stays_whole() -> None:
    text = merge_metrics([({"engine": "main-0"}, ENGINE), ({"engine": "main-1"}, ENGINE)])
    names = [sample.name for sample in families(text)["sglang:e2e_seconds"].samples]
    assert names.count("sglang:e2e_seconds_bucket") == 4
    assert names.count("sglang:e2e_seconds_sum") == 2


def test_a_label_value_is_escaped() -> None:
    text = merge_metrics([({"engine": 'a"b\\c'}, "up 1")])
    assert text == 'up{engine="a\\"b\\\\c"} 1\n'


def test_lines_that_are_no_metrics_are_left_out_and_the_rest_stays() -> None:
    text = merge_metrics([({}, "<html>not found</html>\nup 1\n# a remark\n")])
    assert text == "up 1\n"


def test_empty_pages_make_an_empty_page() -> None:
    assert merge_metrics([({}, "")]) == ""
