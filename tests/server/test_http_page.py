"""docs/http.md and the server say the same."""

from __future__ import annotations

import html
import re
from pathlib import Path

from tests.server.serving import Running

from milepost.server.schema import UNSUPPORTED, Body, ChatBody, CompletionBody

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "http.md").read_text(encoding="utf-8")
WORDS = set(re.findall(r"`([^`\n]+)`", PAGE))


def test_every_request_field_is_explained() -> None:
    fields = {*Body.model_fields, *CompletionBody.model_fields, *ChatBody.model_fields, *UNSUPPORTED}
    quoted = {word for span in WORDS for word in re.split(r"[^\w]+", span)}
    assert fields - quoted == set()


def test_every_route_is_listed(server: Running) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    method = re.compile(r"(GET|POST|DELETE) /")
    listed = {word.replace("{name}", "{model_name}") for word in WORDS if method.match(word)}
    assert routes == listed


def test_the_page_of_routes_has_all_and_needs_nothing_from_elsewhere(server: Running) -> None:
    answer = server.get("/docs")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    document = server.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for method, about in methods.items():
            row = f"<dt><code>{method.upper()} {path}</code></dt><dd>"
            assert row + html.escape(about["description"]) in answer.text
    assert "<code>messages</code>" in answer.text
    assert not re.search(r"https?://|//[a-z]|<script|<link", answer.text)
    for path in ("/redoc", "/docs/oauth2-redirect"):
        assert server.get(path).status_code == 404


def test_every_metric_is_listed_and_exists(server: Running) -> None:
    server.post("/v1/completions", {"prompt": "the quick brown fox " * 20, "max_tokens": 2})
    server.wait_idle()
    text = server.get("/metrics").text
    # The parsed family name has no _total; the page shows what a query uses.
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    names = {name for name in kinds if not name.endswith("_created")}
    listed = {word for word in WORDS if re.fullmatch(r"(vllm|milepost):\w+", word)}
    assert names - listed == set(), "not on the page"
    assert listed - names == set(), "only on the page"
