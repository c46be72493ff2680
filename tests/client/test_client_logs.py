"""The client's log lines go where a user wants them, printable, and leave the user's own lines as they are."""

import logging
from collections.abc import Iterator

import pytest

from nsquark import Producer
from nsquark.client.logs import NamedLog
from nsquark.errors import ConfigError


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.format(record)
        self.seen.append(record)


@pytest.fixture
def application() -> Iterator[tuple[logging.Logger, _Records]]:
    logger, records = logging.getLogger("test.application"), _Records()
    logger.addHandler(records)
    yield logger, records
    logger.removeHandler(records)
    logger.filters.clear()
    logger.setLevel(logging.NOTSET)


def test_lines_of_the_application_stay_as_they_are(application: tuple[logging.Logger, _Records]) -> None:
    logger, records = application
    Producer("127.0.0.1:1", logger=logger)
    logger.warning("a report:\n\tsecond line %s", "x" * 6000)
    (record,) = records.seen
    assert record.getMessage() == "a report:\n\tsecond line " + "x" * 6000 and record.args


def test_lines_of_the_client_are_printable(application: tuple[logging.Logger, _Records]) -> None:
    logger, records = application
    log = NamedLog(logger, "100%\n")
    for line in (log, NamedLog(log.logger, "a member")):
        line.warning("nsqd said %s", "\x1b[31m" + "x" * 6000)
    log.error("failed", exc_info=ValueError("\x1b[2J"))
    assert [record.getMessage().isprintable() for record in records.seen] == [True] * 3
    assert records.seen[0].getMessage().startswith("100%\\n: nsqd said \\x1b[31mxxx")
    assert all(record.getMessage().count("more characters") == 1 for record in records.seen[:2])
    assert records.seen[2].exc_text is not None and "\\x1b[2J" in records.seen[2].exc_text
    assert {(record.name, record.filename) for record in records.seen} == {(logger.name, "test_client_logs.py")}


def test_level_and_filters_of_the_logger_hold(application: tuple[logging.Logger, _Records]) -> None:
    logger, records = application
    log = NamedLog(logger, "producer")
    log.info("too low")
    logger.setLevel(logging.INFO)
    log.info("high enough")
    logger.addFilter(lambda record: "secret" not in record.getMessage())
    log.info("a secret")
    assert [record.getMessage() for record in records.seen] == ["producer: high enough"]


def test_what_is_no_logger_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"logger is a logging.Logger"):
        Producer("127.0.0.1:1", logger="nsq")  # type: ignore[arg-type]
