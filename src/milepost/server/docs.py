"""Bodies are read by `schema.parse_body`; this tells the OpenAPI page what they look like."""

from __future__ import annotations

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
