"""Writes the client's log lines: under one logger unless a user gives another, each naming what it is about."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any, Final

from nsquark.base.logs import library_log, make_printable

client_log: Final = library_log("nsquark.client")


class NamedLog(logging.LoggerAdapter[logging.Logger]):
    """Puts a name, such as topic and channel, in front of each line."""

    def __init__(self, logger: logging.Logger | None, name: str) -> None:
        if logger is not None and make_printable not in logger.filters:
            logger.addFilter(make_printable)
        super().__init__(logger or client_log, {})
        self._start = name.replace("%", "%%") + ": "

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"{self._start}{msg}", kwargs


Log = logging.Logger | NamedLog


def shown_id(message_id: bytes) -> str:
    """Shows a message's id as text, whatever bytes a peer made it of."""
    return message_id.decode("ascii", "backslashreplace")
