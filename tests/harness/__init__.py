"""What the tests stand on: real daemons in real processes, a raw protocol client, and a network that misbehaves."""

from harness.auth import AuthServer
from harness.nsqd import HttpReply, Nsqd, StartFailure, nsqd_is_ours, nsqd_program
from harness.proxy import FaultProxy
from harness.waiting import eventually
from harness.wire import MAGIC, Closed, Frame, Message, Wire, body_of, mpub_body, mpub_messages

__all__ = [
    "MAGIC",
    "AuthServer",
    "Closed",
    "FaultProxy",
    "Frame",
    "HttpReply",
    "Message",
    "Nsqd",
    "StartFailure",
    "Wire",
    "body_of",
    "eventually",
    "mpub_body",
    "mpub_messages",
    "nsqd_is_ours",
    "nsqd_program",
]
