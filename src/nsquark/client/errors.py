"""Defines what can go wrong for a user of the client: one tree, each error named for what happened."""

from typing import Final

ANOTHER_LOOP: Final = "this belongs to another event loop: make one in each asyncio.run"
NO_LOOP: Final = "no event loop runs in this thread: hand over with loop.call_soon_threadsafe, or use nsquark.sync"
NOT_STARTED: Final = "the consumer is not started: use `async with`, await its `start`, or in nsquark.sync use `with`"


class NsqError(Exception):
    """This is the base of every error that the client raises by itself."""


class ConfigError(NsqError, ValueError):
    """Says that an option does not exist or cannot have a value; the text names the option and its range."""


class InvalidName(NsqError, ValueError):
    """Says that no nsqd accepts a topic or channel name. Nothing was sent."""


class MessageTooBig(NsqError, ValueError):
    """Says that a message is more than the nsqd takes. Nothing was sent."""


class WrongHandler(NsqError, TypeError, ValueError):
    """Says that what `run` was given, or what it returned, cannot handle a message. The message goes back to nsqd."""


class NotConnected(NsqError, ConnectionError):
    """Says that the connection could not be made or was lost.

    A publish that fails with it may or may not have reached nsqd; publishing it again gives it at least once.
    """


class Closed(NsqError):
    """Says that the producer or consumer was closed."""


class DecodeFailed(NsqError, ValueError):
    """Says that a body is not what `Message.decode` was asked for.

    A handler that lets it out gives the message up at once: another attempt would fail in the same way.
    """


class TooMuchOutstanding(NsqError):
    """Says that too many publishes wait for their answer: await some, or use `publish`, which waits by itself."""


class ServerError(NsqError):
    """Says that nsqd answered with an error frame: the message was not taken."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        """Is what nsqd said."""
        self.code = text.partition(" ")[0]
        """Is the first word of what nsqd said: E_BAD_TOPIC and the like."""


class IdentifyFailed(NsqError):
    """Says that nsqd refused the connection's settings, or that what answered is no nsqd."""


class AuthFailed(NsqError):
    """Says that nsqd wants a secret, or refused the one it got."""


class LookupFailed(NsqError):
    """Says that no nsqlookupd gave a usable answer."""


class WrongPort(LookupFailed, ConfigError):
    """Says that the address given for nsqlookupd's HTTP API is that of another port: of its own, or of an nsqd."""
