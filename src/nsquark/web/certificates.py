"""Reads what a client's certificate says of it."""

from collections.abc import Mapping
from typing import Any


def common_name(certificate: Mapping[str, Any] | None) -> str:
    """Returns the common name of the certificate's subject, as Python shows it; empty if there is none."""
    for part in (certificate or {}).get("subject", ()):
        for key, value in part:
            if key == "commonName":
                return str(value)
    return ""
