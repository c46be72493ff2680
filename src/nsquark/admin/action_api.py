"""Answers `POST /action`, which the pages' buttons send, with the result of each nsqd and nsqlookupd.

    {"action": "pause", "topic": "orders", "channel": "archive", "node": ""}
    {"ok": true, "message": "", "results": [{"address": "10.0.0.1:4151", "ok": true, "text": ""}]}

The actions are create, delete, pause, unpause, empty and tombstone. Status 502 means that no nsqd or nsqlookupd did it.
"""

from __future__ import annotations

from aiohttp import web

from nsquark.admin.api import BODY_BYTES_MAX, ApiError, answer_v1
from nsquark.admin.changes import change
from nsquark.admin.errors import AllFailed, joined
from nsquark.admin.request_json import string_fields
from nsquark.admin.routing import v1_json
from nsquark.admin.state import AdminState


@answer_v1
async def act(request: web.Request, state: AdminState) -> web.Response:
    try:
        fields = string_fields(await request.content.read(BODY_BYTES_MAX), "action", "topic", "channel", "node")
    except ValueError as error:
        raise ApiError(400, str(error)) from None
    try:
        outcome = await change(request, fields["action"], fields["topic"], fields["channel"], fields["node"])
    except AllFailed as error:
        return v1_json({"ok": False, "message": str(error), "results": []}, 502)
    # The page that is shown next should show what was done.
    await state.snapshot_after_change()
    results = [{"address": each.address, "ok": each.is_done, "text": each.text} for each in outcome.results]
    message = joined(outcome.errors) or ("" if results else "no nsqd has it")
    answer = {"ok": outcome.is_done, "message": message, "results": results}
    return v1_json(answer, 200 if outcome.is_done else 502)


routes: list[web.RouteDef] = [web.post("/action", act)]
