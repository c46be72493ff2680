from collections.abc import Callable

from nsquark.kernel.replies import ReplyQueue
from nsquark.kernel.tail import Tail

MPUB_TURN_MESSAGES_MAX: int
MPUB_WHOLE_MESSAGES_MAX: int

class Intake:
    @property
    def tail(self) -> Tail: ...
    def __init__(
        self,
        name: str,
        tail: Tail,
        replies: ReplyQueue,
        published: dict[str, int],
        on_congested: Callable[[], None],
        message_bytes_max: int,
        body_bytes_max: int,
    ) -> None: ...
    def publish(self, data: bytearray, pos: int, end: int) -> int: ...
