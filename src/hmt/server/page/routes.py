"""GET / and its files, and GET /v1/hmt/state."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from hmt.server.model_manager import manager_of
from hmt.server.page import state
from hmt.server.page.documents import DOCUMENTS, Document
from hmt.server.service import service_of

router = APIRouter()


@router.get("/v1/hmt/state")
async def engine_state(request: Request, model: str | None = None) -> state.State:
    """What the machine does: memory, links, experts, requests, and what bounds them.

    model   whose; the first one when left out
    """
    service = service_of(request, model)
    return await service.watch.see(service, manager_of(request))


def _serve(path: str, document: Document) -> None:
    @router.get(path, include_in_schema=False)
    async def page(request: Request) -> Response:
        if request.headers.get("if-none-match") == document.headers["ETag"]:
            return Response(status_code=304, headers=document.headers)
        return Response(document.content, headers=document.headers)


for _path, _document in DOCUMENTS.items():
    _serve(_path, _document)
