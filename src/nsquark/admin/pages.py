"""Makes the pages of the last snapshot, their pieces for the event stream, and the list of names that `/` searches.

`find` is the one place where a path becomes a page, for the browser that opens it and for its stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

from aiohttp import web

from nsquark.admin import access, views_cluster, views_topics
from nsquark.admin.errors import AllFailed
from nsquark.admin.roles import ROLE_NEEDED, Identity
from nsquark.admin.snapshot import Snapshot
from nsquark.admin.state import STATE, AdminState, Live
from nsquark.admin.urls import Urls, channel_path, node_path, topic_path
from nsquark.admin.view import Crumb, Pieces, View, environment, pieces
from nsquark.base.version import __version__

NAV: Final = (
    ("Overview", "/", "overview"),
    ("Topics", "/topics", "topics"),
    ("Nodes", "/nodes", "nodes"),
    ("Spark", "/spark", "spark"),
    ("Lookup", "/lookup", "lookup"),
    ("Counter", "/counter", "counter"),
)
SHORTCUTS: Final = (
    ("/", "find a topic, channel, node or page"),
    ("g o", "overview"),
    ("g t", "topics"),
    ("g n", "nodes"),
    ("g s", "Spark queries"),
    ("g l", "lookup"),
    ("g c", "counter"),
    ("j k", "next and previous row"),
    ("f", "filter of this page"),
    ("?", "this list"),
    ("Esc", "close"),
)
SEARCH_ENTRIES_MAX: Final = 50_000


def find(state: AdminState, page: str) -> View | None:
    """Returns the page at this path and query, or None if there is none, or none any more."""
    path, _, query = page.partition("?")
    match [unquote(piece) for piece in path.split("/") if piece]:
        case []:
            return views_cluster.overview(state)
        case ["topics"]:
            return views_topics.streams(state, dict(parse_qsl(query)))
        case ["topics", topic]:
            return views_topics.topic(state, topic)
        case ["topics", topic, channel]:
            return views_topics.channel(state, topic, channel)
        case ["messages", topic]:
            return views_topics.messages(state, topic)
        case ["nodes"]:
            return views_cluster.nodes(state)
        case ["nodes", address]:
            return views_cluster.node(state, address)
        case ["counter"]:
            return views_cluster.counter(state)
        case ["spark"]:
            return views_cluster.spark(state)
    return None


def live(state: AdminState, page: str) -> Live:
    """Returns what the event stream of this page sends."""
    view = find(state, page)
    if view is None:
        return Live()
    state.history.watch(view.sparks)
    if view.client_watch:
        state.watch(*view.client_watch)
    return Live(pieces(view, _urls(state)), view.series)


# -- for browsers ----------------------------------------------------------------------------------------


async def page(request: web.Request) -> web.Response:
    state = request.app[STATE]
    await state.fresh_snapshot()
    below = request.raw_path.removeprefix(state.base_path)
    view = find(state, below)
    if view is None:
        # The topic, channel or nsqd may be newer than the last poll.
        await state.snapshot_after_change()
        view = find(state, below)
    if view is not None and view.client_watch:
        await state.clients(*view.client_watch)
        view = find(state, below)
    return show(request, view or _missing(below))


async def lookup_page(request: web.Request) -> web.Response:
    state = request.app[STATE]
    snapshot = await state.fresh_snapshot()
    inactive: dict[str, list[str]] = {}
    trouble = ""
    # Those that fail are named on the page already, and to wait for them would only delay it.
    answering = [lookupd.address for lookupd in snapshot.lookupds if not lookupd.failure]
    try:
        if answering:
            inactive = (await state.survey.inactive(answering)).value
        elif snapshot.lookupds:
            trouble = "no nsqlookupd answers"
    except AllFailed as error:
        trouble = str(error)
    return show(request, views_cluster.lookup(state, inactive, trouble))


async def search(request: web.Request) -> web.Response:
    """Lists everything that has a name, so that the browser can search as fast as the user types."""
    snapshot = await request.app[STATE].fresh_snapshot()
    entries = [entry for entry, _ in zip(_entries(snapshot), range(SEARCH_ENTRIES_MAX), strict=False)]
    return web.json_response({"entries": entries})


def _entries(snapshot: Snapshot) -> Iterator[dict[str, str]]:
    for name, path, _ in NAV:
        yield {"kind": "page", "name": name, "path": path, "hint": ""}
    for address, node in snapshot.nodes.items():
        hint = node.hostname if node.hostname != address else ""
        yield {"kind": "node", "name": address, "path": node_path(address), "hint": hint}
    for name in snapshot.topics:
        yield {"kind": "topic", "name": name, "path": topic_path(name), "hint": ""}
    for name, topic in snapshot.topics.items():
        for channel in topic.channels:
            yield {"kind": "channel", "name": channel, "path": channel_path(name, channel), "hint": f"of {name}"}


def _missing(path: str) -> View:
    match [unquote(piece) for piece in path.partition("?")[0].split("/") if piece]:
        case ["topics", topic]:
            heading, back = f"No topic is called {topic}", Crumb("All topics", "/topics")
            text = "It was deleted, or no nsqd that answers has it."
        case ["messages", topic]:
            heading, back = "No messages to look into", Crumb("All topics", "/topics")
            text = f"There is no topic {topic}, or this nsqadmin was started with --no-message-browser."
        case ["topics", topic, channel]:
            heading, back = f"{topic} has no channel {channel}", Crumb(topic, topic_path(topic))
            text = "It was deleted, or no nsqd that answers has it."
        case ["nodes", address]:
            heading, back = f"No nsqd is known at {address}", Crumb("All nodes", "/nodes")
            text = "It is gone from nsqlookupd, or was never there."
        case _:
            heading, back, text = "There is no such page", Crumb("Overview", "/"), "Press / to find what you look for."
    context = {"heading": heading, "text": text, "back": back}
    return View(
        template="missing.html",
        parts="common.html",
        title="Not found",
        section="",
        context=context,
        status=404,
        is_live=False,
    )


# -- drawing ---------------------------------------------------------------------------------------------


class Permissions:
    """Answers `may("pause_topic")` in templates."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def __call__(self, action: str) -> bool:
        return self._identity.may(action)

    @property
    def classes(self) -> str:
        """Returns CSS classes for what the user may do. Rows are the same for everybody, and styles hide what the user
        may not do.
        """
        return " ".join(f"may-{action}" for action in ROLE_NEEDED if self(action))


def show(request: web.Request, view: View) -> web.Response:
    state = request.app[STATE]
    urls = _urls(state)
    identity = access.identity_of(request)
    response = render(
        request,
        view.template,
        view=view,
        v=view.context,
        pieces=Pieces(view, pieces(view, urls)),
        csrf=access.csrf_token(request),
        may=Permissions(identity),
        user=identity.name,
        role=identity.role.word,
        nav=[(*entry, _count(state, entry[0])) for entry in NAV],
        shortcuts=SHORTCUTS,
        lookupd=next(iter(state.cluster.lookupds), ""),
    )
    response.set_status(view.status)
    return response


def _count(state: AdminState, section: str) -> int:
    snapshot = state.snapshot
    return {"Topics": len(snapshot.topics), "Nodes": len(snapshot.nodes), "Spark": len(snapshot.queries)}.get(
        section, 0
    )


def render(request: web.Request, template: str, **values: Any) -> web.Response:
    """Renders a template to a whole page."""
    values = {"urls": _urls(request.app[STATE]), "version": __version__, **values}
    return web.Response(text=environment().get_template(template).render(values), content_type="text/html")


def _urls(state: AdminState) -> Urls:
    return Urls(state.base_path)


routes: Final = [
    web.get("/", page),
    web.get("/topics", page),
    web.get("/topics/{topic}", page),
    web.get("/topics/{topic}/{channel}", page),
    web.get("/messages/{topic}", page),
    web.get("/nodes", page),
    web.get("/nodes/{node}", page),
    web.get("/counter", page),
    web.get("/spark", page),
    web.get("/lookup", lookup_page),
    web.get("/search.json", search),
]
