"""What can go wrong for a user of the client: one tree, each error named for what happened."""

from typing import Final

ANOTHER_LOOP: Final = "this belongs to another event loop: make one in each asyncio.run"


class NsqError(Exception):
    """Every error that the client raises by itself."""


class ConfigError(NsqError, ValueError):
    """An option that does not exist or a value it cannot have; the text names the option and its range."""


class InvalidName(NsqError, ValueError):
    """A topic or channel name that no nsqd accepts. Nothing was sent."""


class MessageTooBig(NsqError, ValueError):
    """More than the nsqd takes. Nothing was sent."""


class WrongHandler(NsqError, TypeError, ValueError):
    """What `run` was given, or what it returned, cannot handle a message. The message goes back to nsqd."""


class NotConnected(NsqError, ConnectionError):
    """The connection could not be made or was lost.

    A publish that fails with it may or may not have reached nsqd; publishing it again gives it at least once.
    """


class Closed(NsqError):
    """The producer or consumer was closed."""


class DecodeFailed(NsqError, ValueError):
    """A body is not what `Message.decode` was asked for.

    A handler that lets it out gives the message up at once: another attempt would fail in the same way.
    """


class TooMuchOutstanding(NsqError):
    """Too many publishes wait for their answer: await some, or use `publish`, which waits by itself."""


class ServerError(NsqError):
    """nsqd answered with an error frame: the message was not taken."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        """What nsqd said."""
        self.code = text.partition(" ")[0]
        """The first word of it: E_BAD_TOPIC and the like."""


class IdentifyFailed(NsqError):
    """nsqd refused the connection's settings, or what answered is no nsqd."""


class AuthFailed(NsqError):
    """nsqd wants a secret, or refused the one it got."""


class LookupFailed(NsqError):
    """No nsqlookupd gave a usable answer."""


class WrongPort(LookupFailed, ConfigError):
    """The address given for nsqlookupd's HTTP API is that of its TCP port."""
