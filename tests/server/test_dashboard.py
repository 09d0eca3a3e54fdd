"""deploy/grafana/milepost.json asks for nothing that the server does not have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.serving import Running
from tests.server.test_life import LONG

PATH = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "milepost.json"
DASHBOARD: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
METRIC = re.compile(r"\b((?:vllm|milepost):\w+)")
FUNCTIONS = {"sum", "rate", "by", "histogram_quantile", "min", "max"}


def expressions() -> Iterator[tuple[str, str, str]]:
    """(panel, expression, legend) of every target."""
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]


@pytest.fixture
def samples(server: Running) -> dict[str, set[str]]:
    """Sample name -> labels it has, of a server that did some work."""
    for prompt in (LONG, LONG + "more", LONG):
        server.post("/v1/completions", {"prompt": prompt, "max_tokens": 3})
    server.wait_idle()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    # Labelled counters without an event have no sample yet.
    found.setdefault("milepost:evictions_total", {"move", "reason", "model_name", "engine"})
    found.setdefault("milepost:refusals_total", {"why", "reason", "model_name", "engine"})
    return found


def test_every_expression_names_metrics_and_labels_that_exist(samples: dict[str, set[str]]) -> None:
    for title, expression, legend in expressions():
        names = METRIC.findall(expression)
        assert names, title
        for name in names:
            assert name in samples, f"{title}: {name}"
        known = set.intersection(*(samples[name] for name in names))
        for labels in re.findall(r"by \(([^)]*)\)", expression):
            assert set(re.split(r",\s*", labels)) <= known, f"{title}: {labels}"
        for labels in re.findall(r"\{([^}]*)\}", expression):
            assert {label for label, _ in re.findall(r'(\w+)(=~|=)"', labels)} <= known, f"{title}: {labels}"
        grouped = {
            label.strip()
            for labels in re.findall(r"by \(([^)]*)\)", expression)
            for label in labels.split(",")
        }
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= grouped, f"{title}: {legend}"


def test_expressions_are_well_formed() -> None:
    for title, expression, _ in expressions():
        for opening, closing in ("()", "{}", "[]"):
            assert expression.count(opening) == expression.count(closing), title
        bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)|(?:vllm|milepost):\w+", "", expression)
        assert set(re.findall(r"[a-z_]+", bare)) <= FUNCTIONS, title
        for name in METRIC.findall(expression):
            rated = f"rate({name}" in expression
            assert rated == name.endswith(("_total", "_bucket")), f"{title}: rates are of counters only"


def test_panels_do_not_overlap_and_use_the_variable() -> None:
    places = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert (place["x"], place["y"]) not in places
        places.add((place["x"], place["y"]))
        assert all('model_name=~"$model"' in target["expr"] for target in panel["targets"])
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_responses_are_counted_by_status(server: Running) -> None:
    before = server.metrics()
    server.get("/v1/nothing")
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    server.post("/v1/completions", {"prompt": 5})
    after = server.metrics()
    for status, number in (("404", 1), ("200", 2), ("400", 1)):
        name = f"milepost:http_responses_total{{status={status}}}"
        assert after[name] - before.get(name, 0) == number, status
    assert after["milepost:http_requests_open"] == 1
