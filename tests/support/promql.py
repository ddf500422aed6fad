"""Which labels a PromQL expression yields, and which it asks of metrics that do not have them."""

from collections.abc import Mapping
from typing import Any

import promql_parser as promql

from rollout.agents.worker.metrics import METRICS as AGENTS_METRICS
from rollout.observability.page.prometheus import METRICS as SERVER_METRICS
from rollout.router.metrics import METRICS as ROUTER_METRICS

SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
# Of every sample: the page or its list of targets adds ``server``, Prometheus the others.
ALWAYS = {"server", "job", "instance"}

# Name of a series -> the labels it has.
SERIES: Mapping[str, set[str]] = {
    name + suffix: {*labels, *ALWAYS, *(["le"] if suffix == "_bucket" else [])}
    for name, (kind, labels, _) in (SERVER_METRICS | ROUTER_METRICS | AGENTS_METRICS).items()
    for suffix in SUFFIXES[kind]
}


def labels_of(expression: str) -> set[str]:
    """The labels of what the expression yields.

    Raises:
        ValueError: it is no PromQL.
        AssertionError: a series that is not exported, or a label that a series does not have.
    """
    return _labels(promql.parse(expression))


def _labels(node: Any) -> set[str]:
    match type(node).__name__:
        case "VectorSelector":
            return _of_series(node)
        case "MatrixSelector":
            return _labels(node.vector_selector)
        case "NumberLiteral" | "StringLiteral":
            return set()
        case "ParenExpr" | "UnaryExpr" | "SubqueryExpr":
            return _labels(node.expr)
        case "Call":
            inner = set().union(*(_labels(one) for one in node.args))
            return inner - {"le"} if node.func.name == "histogram_quantile" else inner
        case "AggregateExpr":
            return _of_aggregate(node)
        case "BinaryExpr":
            return _of_binary(node)
    raise AssertionError(f"{type(node).__name__} is not known here")


def _of_series(node: Any) -> set[str]:
    assert node.name in SERIES, f"{node.name} is not told"
    has = SERIES[node.name]
    for one in node.matchers.matchers:
        assert one.name in has, f"{node.name} has no label {one.name}, but {sorted(has)}"
    return set(has)


def _of_aggregate(node: Any) -> set[str]:
    inner = _labels(node.expr)
    if str(node.op) in ("topk", "bottomk"):
        return inner
    if node.modifier is None:
        return set()
    by = set(node.modifier.labels)
    assert str(node.modifier).startswith("by"), "only by is used here"
    assert by <= inner, f"{sorted(by - inner)} of {node.prettify()}"
    return by


def _of_binary(node: Any) -> set[str]:
    left, right = _labels(node.lhs), _labels(node.rhs)
    if not left or not right:
        return left | right
    if node.modifier is None or node.modifier.matching is None:
        return left if str(node.op).strip() in ("and", "unless") else left & right
    on = set(node.modifier.matching.labels)
    assert on <= left & right, f"{sorted(on)} of {node.prettify()}"
    card = str(node.modifier.card)
    return right if "OneToMany" in card else left if "ManyToOne" in card else on
