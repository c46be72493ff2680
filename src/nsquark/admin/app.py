"""Makes the aiohttp application: the routes of all parts under the base path, and the middlewares around them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from aiohttp import web

from nsquark.admin import access, action_api, api, assets, config_api, events, graphite, messages, pages
from nsquark.admin.accounts import Accounts
from nsquark.admin.actions import Actions
from nsquark.admin.audit import Audit
from nsquark.admin.clients import Clients
from nsquark.admin.cluster import ClusterClient
from nsquark.admin.events import Streams
from nsquark.admin.history import History
from nsquark.admin.middlewares import MIDDLEWARES, remember_beginning
from nsquark.admin.options import NsqadminOptions, normal_base_path
from nsquark.admin.poller import Poller
from nsquark.admin.routing import NotFoundRules, for_aiohttp
from nsquark.admin.state import STATE, AdminState
from nsquark.admin.survey import Survey
from nsquark.base.logs import Logger

REQUEST_BYTES_MAX: Final = 8 << 20

PARTS: Final = (api, config_api, graphite, action_api, assets, access, events, messages, pages)
"""Each part has `routes`, with paths relative to the base path. The first route that fits a request takes it."""


def make_state(options: NsqadminOptions, logger: Logger) -> AdminState:
    """Makes the state of nsqadmin. It raises OptionsError if a file that an option names cannot be used."""
    cluster = ClusterClient(options)
    survey = Survey(cluster)
    history = History()
    clients = Clients(cluster)
    patience_s = options.http_client_request_timeout.seconds
    return AdminState(
        options=options,
        logger=logger,
        base_path=normal_base_path(options.base_path),
        cluster=cluster,
        survey=survey,
        actions=Actions(cluster, survey),
        history=history,
        client_lists=clients,
        poller=Poller(cluster, history, clients, logger, options.poll_interval.seconds, patience_s),
        streams=Streams(pages.live),
        access=Accounts(options, logger),
        audit=Audit(options, cluster, logger),
    )


def make_app(state: AdminState) -> web.Application:
    routes = [(route.method, state.url(route.path), route.handler) for part in PARTS for route in part.routes]
    rules = NotFoundRules([(method, path) for method, path, _ in routes])
    app = web.Application(
        middlewares=[*MIDDLEWARES, access.guard, rules.middleware],
        client_max_size=REQUEST_BYTES_MAX,
    )
    app[STATE] = state
    for method, path, handler in routes:
        app.router.add_route(method, for_aiohttp(path), handler)
    app.on_response_prepare.append(access.add_headers)
    app.on_response_prepare.append(remember_beginning)
    app.cleanup_ctx.append(_running)
    app.on_shutdown.append(_end_streams)
    return app


async def _running(app: web.Application) -> AsyncIterator[None]:
    state = app[STATE]
    state.poller.start()
    state.audit.start()
    yield
    await state.audit.stop()
    await state.poller.stop()
    await state.client_lists.stop()
    await state.cluster.close()


async def _end_streams(app: web.Application) -> None:
    """Ends the streams of events before the server waits for open requests, since a stream never ends by itself."""
    app[STATE].streams.close()
