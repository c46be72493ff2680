"""Has what the tests stand on: daemons in processes, a raw protocol client, a network that misbehaves."""

from harness.auth import AuthServer
from harness.nsqd import HttpReply, Nsqd, StartError, nsqd_is_ours, nsqd_program
from harness.proxy import FaultProxy
from harness.waiting import eventually, until
from harness.wire import MAGIC, ClosedError, Frame, Message, Wire, body_of, mpub_body, mpub_messages

__all__ = [
    "MAGIC",
    "AuthServer",
    "ClosedError",
    "FaultProxy",
    "Frame",
    "HttpReply",
    "Message",
    "Nsqd",
    "StartError",
    "Wire",
    "body_of",
    "eventually",
    "mpub_body",
    "mpub_messages",
    "nsqd_is_ours",
    "nsqd_program",
    "until",
]
