"""Table, JSON and chart of a replay."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from milepost.sim.plot import svg
from milepost.sim.replay import ReplayResult
from milepost.sim.report import COLUMNS, GIB, Report, as_json, quantile, rows, table


def result(policy: str, gib: int, cached: list[int], **more: object) -> ReplayResult:
    return ReplayResult(policy, gib * GIB, [100, 100, 100, 100], cached, **more)  # type: ignore[arg-type]


REPORT = Report(
    "trace <x>",
    ("a note",),
    (
        result("milepost", 8, [0, 0, 50, 70], num_passes=7, num_checkpoints=3,
               evictions={("drop", "tail"): 5}, seconds_to_first_token=[0.1, 0.2, 0.3, 4.0]),
        result("lru", 8, [0, 0, 10, 10]),
        result("milepost", 64, [0, 90, 90, 90], num_passes=5),
    ),
)  # fmt: skip


def test_rows_and_table() -> None:
    first, second, third = rows(REPORT)
    assert len(first) == len(COLUMNS)
    assert first == ["milepost", "8", "30.0", "60.0", "0", "7", "0.200", "4.000", "3", "5"]
    assert second == ["lru", "8", "5.0", "10.0", "0", "-", "-", "-", "-", "-"]
    assert third[:4] == ["milepost", "64", "67.5", "90.0"]
    lines = table(REPORT).splitlines()
    assert lines[0] == "trace <x>" and lines[-1] == "note: a note"
    assert lines[2].split() == ["budget", "reused", "second", "computed", "TTFT", "TTFT"]
    assert lines[3].split()[:3] == ["policy", "GiB", "%"] and set(lines[4]) == {"-", " "}
    assert lines[5].split() == first and lines[6].split() == second


@pytest.mark.parametrize("seconds", [[], [10.0, 20.0]])
def test_the_table_fits_into_80_columns(seconds: list[float]) -> None:
    """With numbers of a large replay; what nothing was measured of takes no room."""
    large = result("milepost-lru", 512, [90, 90, 90, 90], num_passes=123456, num_checkpoints=123456,
                   num_computed_tokens=12345678, evictions={("drop", "tail"): 123456},
                   seconds_to_first_token=seconds)  # fmt: skip
    text = table(Report("large", (), (large, result("lru", 8, [0, 0, 10, 10]))))
    assert max(map(len, text.splitlines())) <= 80
    assert ("TTFT" in text) is bool(seconds)


def test_json_round_trips() -> None:
    document = json.loads(as_json(REPORT, per_request=True))
    first = document["results"][0]
    assert (first["hit_rate"], first["second_half_hit_rate"]) == (0.3, 0.6)
    assert first["evictions"] == {"drop/tail": 5}
    assert first["num_cached_tokens_per_request"] == [0, 0, 50, 70]
    assert "num_cached_tokens_per_request" not in json.loads(as_json(REPORT))["results"][0]


def test_quantiles() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [quantile(values, share) for share in (0.0, 0.5, 0.95, 1.0)] == [1.0, 50.0, 95.0, 100.0]
    assert quantile([], 0.5) == 0.0


def test_chart_is_xml_with_one_line_a_policy() -> None:
    root = ElementTree.fromstring(svg(REPORT))
    space = "{http://www.w3.org/2000/svg}"
    lines = root.findall(f"{space}polyline")
    assert len(lines) == 2
    (x8, y8), (x64, y64) = (tuple(map(float, p.split(","))) for p in lines[0].attrib["points"].split())
    assert x8 < x64 and y8 > y64
    assert "trace <x>" in [text.text for text in root.findall(f"{space}text")]
    with pytest.raises(ValueError, match="nothing to plot"):
        svg(Report("empty", (), ()))
    single = svg(Report("one", (), (result("lru", 8, [0, 0, 0, 0]),)))
    assert ElementTree.fromstring(single) is not None
