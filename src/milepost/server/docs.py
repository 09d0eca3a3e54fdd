"""`/openapi.json` and `/docs`. Bodies are read by `schema.parse_body`; this tells what they look like.

FastAPI's own pages load their scripts from another host: a server that may have no network has a plain one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from pydantic import BaseModel


def json_body(kind: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that takes `kind` as its JSON body."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    for name, definition in definitions.items():
        schema = _inlined(schema, f"#/components/schemas/{name}", definition)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(node: Any, reference: str, definition: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        if node.get("$ref") == reference:
            return definition
        return {key: _inlined(value, reference, definition) for key, value in node.items()}
    if isinstance(node, list):
        return [_inlined(item, reference, definition) for item in node]
    return node


PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Milepost: routes</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 1rem auto; max-width: 60rem; padding: 0 1rem; font: 15px/1.45 system-ui, sans-serif; }}
dt {{ font-weight: 600; overflow-wrap: anywhere; }} dd {{ margin: 0 0 .9rem 1.5rem; }}
.fields {{ font-size: .85rem; opacity: .8; }}
</style>
</head>
<body>
<h1>Milepost {version}</h1>
<p><a href="openapi.json"><code>/openapi.json</code></a> has these routes with fields and types, for tools.
What the fields mean, and what a response says about reuse, is in <code>docs/http.md</code> of the project.
<a href="ui"><code>/ui</code></a> shows what the cache holds.</p>
<dl>
{rows}
</dl>
</body>
</html>
"""


def routes_page(openapi: Mapping[str, Any]) -> str:
    """A page that lists the routes of an OpenAPI document; it needs nothing but itself."""
    rows = "\n".join(_rows(openapi["paths"]))
    return _PAGE.format(version=escape(openapi["info"]["version"]), rows=rows)


def _rows(paths: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, about in methods.items():
            body = about.get("requestBody", {}).get("content", {}).get("application/json", {})
            properties = body.get("schema", {}).get("properties", {})
            names = ", ".join(f"<code>{escape(name)}</code>" for name in properties)
            fields = f'<br><span class="fields">{names}</span>' if names else ""
            route = f"<dt><code>{method.upper()} {escape(path)}</code></dt>"
            yield f"{route}<dd>{escape(about.get('description', ''))}{fields}</dd>"
