"""Knows what can be known of this machine before any option is read."""

import socket
from typing import Final

HOSTNAME: Final = socket.gethostname()
