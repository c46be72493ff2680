"""Declares the flags that tell commands where NSQ is; it works without Spark being installed."""

import argparse
from typing import Any

from nsquark.base.errors import UserError


def add_where_arguments(
    parser: argparse.ArgumentParser, *, nsqd_help: str, option_help: str
) -> argparse._ArgumentGroup:
    """Adds the flags that name nsqds or nsqlookupds, the secret for them, and further options of the source; returns
    the group of these flags.
    """
    group = parser.add_argument_group("NSQ")
    repeated: dict[str, Any] = {"action": "append", "default": []}
    group.add_argument("--nsqd-http-address", **repeated, metavar="HOST:PORT", help=nsqd_help)
    group.add_argument("--lookupd-http-address", **repeated, metavar="HOST:PORT", help="an nsqlookupd (repeat)")
    group.add_argument("--auth-secret-file", metavar="FILE", help="file with the secret for nsqds with AUTH")
    group.add_argument("--option", **repeated, metavar="NAME=VALUE", help=option_help)
    return group


def settings_of(pairs: list[str], flag: str) -> dict[str, str]:
    """Returns the NAME=VALUE pairs of a flag that is given several times."""
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise UserError(f"{flag} {pair!r} is not NAME=VALUE")
        settings[name] = value
    return settings
