from nsquark.kernel.replies import ReplyQueue
from nsquark.kernel.tail import Tail

class HttpLane:
    @property
    def replies(self) -> ReplyQueue: ...
    def __init__(
        self, tail: Tail, replies: ReplyQueue, before: bytes, behind: bytes, message_bytes_max: int
    ) -> None: ...
    def handle(self, data: bytes) -> bool: ...
