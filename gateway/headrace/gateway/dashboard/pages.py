"""The dashboard's pages: HTML, style and scripts as they lie in `static/`, without a build and without anything from elsewhere.

Guarantees: a browser runs only what this gateway serves (Content-Security-Policy), also where a trajectory holds HTML; the pages hold no
data and need no key, what they show does.
"""

from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.responses import FileResponse
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

STATIC = Path(__file__).parent / "static"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # A gateway of another release may answer next: look whether it changed.
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def dashboard() -> FileResponse:
    """The dashboard."""
    return FileResponse(STATIC / "index.html", headers=HEADERS)


@router.get("/trajectory")
async def trajectory() -> FileResponse:
    """The page of one trajectory."""
    return FileResponse(STATIC / "trajectory.html", headers=HEADERS)


class _Files(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        found = await super().get_response(path, scope)
        found.headers.update(HEADERS)
        return found


def install(app: FastAPI) -> None:
    """Serve the pages."""
    app.include_router(router)
    app.mount("/dashboard/static", _Files(directory=STATIC), name="dashboard")
