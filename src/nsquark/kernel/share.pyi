class Share:
    @property
    def id(self) -> int: ...
    rdy: int
    rdy_max: int
    in_flight: int
    msg_timeout_ms: int
    message_count: int
    finish_count: int
    requeue_count: int
    def __init__(self, share_id: int, rdy_max: int, msg_timeout_ms: int) -> None: ...
