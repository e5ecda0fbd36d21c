"""The files of the web page: a fixed list, no external resources, a strict content policy."""

from __future__ import annotations

from pathlib import Path

from fastapi.responses import FileResponse, Response
from starlette.exceptions import HTTPException

_MEDIA_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "view.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def page_response(web_dir: Path, name: str) -> Response:
    """One file of the page.

    Raises:
        HTTPException: 404, it is not one of them.
    """
    media_type = _MEDIA_TYPES.get(name)
    if media_type is None:
        raise HTTPException(404, f"there is no page file of this name, only {list(_MEDIA_TYPES)}")
    return FileResponse(web_dir / name, media_type=media_type, headers=_HEADERS)
