"""The page at `/docs`: the OpenAPI document as plain HTML, with nothing fetched from anywhere."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Response

_STYLE = """
:root { color-scheme: light dark; font-family: system-ui, sans-serif; line-height: 1.5; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; padding: .5rem 0; }
code { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .25rem .5rem; border-bottom: 1px solid #8884; }
""".strip()
_STYLE_SUM = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_STYLE_SUM}'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def build_docs_routes(app: FastAPI) -> APIRouter:
    """The route of the page."""
    router = APIRouter(redirect_slashes=False, include_in_schema=False)

    @router.get("/docs")
    async def docs() -> Response:
        return Response(docs_html(app.openapi()), media_type="text/html; charset=utf-8", headers=_HEADERS)

    return router


def docs_html(document: Mapping[str, Any]) -> str:
    """An OpenAPI document as a page: each operation with the fields of its body and its statuses."""
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    schemas = document.get("components", {}).get("schemas", {})
    operations = "\n".join(
        _operation(path, method, operation, schemas)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n'
        f'<p>Machine-readable: <a href="openapi.json">openapi.json</a></p>\n{operations}\n</body></html>\n'
    )


def _operation(path: str, method: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    head = f"<code>{escape(method.upper())} {escape(path)}</code> {escape(operation.get('summary', ''))}"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    schema = schemas.get(body.get("$ref", "").rpartition("/")[2], {})
    fields = _table(("field", "takes", ""), _fields(schema))
    statuses = _table(
        ("status", "when"), [(code, each["description"]) for code, each in operation["responses"].items()]
    )
    return f"<details><summary>{head}</summary>\n{fields}{statuses}</details>"


def _fields(schema: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        yield name, _takes(field), "required" if name in required else field.get("description", "")


def _takes(field: Mapping[str, Any]) -> str:
    """The values of a field in one line."""
    if "anyOf" in field:
        return " or ".join(_takes(form) for form in field["anyOf"] if form.get("type") != "null")
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "const" in field:
        return json.dumps(field["const"])
    if "enum" in field:
        return " or ".join(json.dumps(value) for value in field["enum"])
    if field.get("type") == "array":
        return f"array of ({_takes(field.get('items', {}))})"
    low, high = (field.get(name, "") for name in ("minimum", "maximum"))
    limits = f" {low}..{high}" if f"{low}{high}" else ""
    return f"{field.get('type', 'any')}{limits}"


def _table(head: tuple[str, ...], rows: Any) -> str:
    def line(tag: str, cells: tuple[str, ...]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    lines = [line("td", row) for row in rows]
    return f"<table>{line('th', head)}{''.join(lines)}</table>\n" if lines else ""
