"""GET / and its files, and GET /v1/hmt/state."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from hmt.server.page import state
from hmt.server.page.documents import DOCUMENTS, Document
from hmt.server.page.watch import Watch
from hmt.server.service import service_of

router = APIRouter()


@router.get("/v1/hmt/state")
async def engine_state(request: Request) -> state.State:
    """What the machine does: memory, links, experts, requests, and what bounds them."""
    watch: Watch = request.app.state.watch
    return await watch.see(service_of(request))


def _serve(path: str, document: Document) -> None:
    @router.get(path, include_in_schema=False)
    async def page(request: Request) -> Response:
        if request.headers.get("if-none-match") == document.headers["ETag"]:
            return Response(status_code=304, headers=document.headers)
        return Response(document.content, headers=document.headers)


for _path, _document in DOCUMENTS.items():
    _serve(_path, _document)
