"""Writes the client's log lines: under one logger unless a user gives another, each naming what it is about."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any, Final

from nsquark.base.logs import library_log, make_printable
from nsquark.client.errors import ConfigError

client_log: Final = library_log("nsquark.client")


class NamedLog(logging.LoggerAdapter[logging.Logger]):
    """Puts a name, such as topic and channel, in front of each line."""

    def __init__(self, logger: logging.Logger | None, name: str) -> None:
        super().__init__(client_log if logger is None else _printable(logger), {})
        self._start = name.replace("%", "%%") + ": "

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"{self._start}{msg}", kwargs


Log = logging.Logger | NamedLog


class _Printable(logging.Logger):
    """Makes the client's lines printable on their way to a user's logger, whose other lines stay as they are."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger.name)
        self._logger = logger
        self.addFilter(make_printable)

    def isEnabledFor(self, level: int) -> bool:
        return self._logger.isEnabledFor(level)

    def handle(self, record: logging.LogRecord) -> None:
        if self.filter(record):
            self._logger.handle(record)


def _printable(logger: logging.Logger) -> logging.Logger:
    if not isinstance(logger, logging.Logger):
        raise ConfigError(f"logger is a logging.Logger, such as logging.getLogger('nsq'), not {logger!r}")
    return logger if make_printable in logger.filters else _Printable(logger)


def shown_id(message_id: bytes) -> str:
    """Shows a message's id as text, whatever bytes a peer made it of."""
    return message_id.decode("ascii", "backslashreplace")
