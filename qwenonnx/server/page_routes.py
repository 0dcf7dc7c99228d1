"""The chat page at `/`: a handful of files that come with the program, and none from anywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fastapi import APIRouter, Response
from starlette.exceptions import HTTPException

from qwenonnx.text.presets import presets_json

_FOLDER = Path(__file__).parent / "page"
_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
# Only the page's own scripts run, and only this server is talked to, whatever a model's answer says.
_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
PAGE_PATHS = ("/", "/page/")


def build_page_routes() -> APIRouter:
    """The routes of the page."""
    files = {path.name: path.read_bytes() for path in _FOLDER.iterdir() if path.suffix in _TYPES}
    files["presets.json"] = presets_json().encode()
    router = APIRouter(redirect_slashes=False, include_in_schema=False)

    def answer(name: str) -> Response:
        return Response(files[name], media_type=_TYPES[Path(name).suffix], headers=dict(_HEADERS))

    @router.get("/")
    async def page() -> Response:
        return answer("index.html")

    @router.get("/page/{name}")
    async def part(name: str) -> Response:
        if name not in files:
            raise HTTPException(status_code=404)
        return answer(name)

    return router
