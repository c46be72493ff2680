"""Reads secrets from files: on a command line, everybody on the machine would see them."""

from pathlib import Path
from typing import Final

SECRET_BYTES_MAX: Final = 4096


def read_secret(path: str | Path) -> str:
    """Returns the file's text without the line break at its end; a ValueError says what is wrong with it."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(SECRET_BYTES_MAX + 1)
        secret = data.decode().rstrip("\r\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text") from None
    if len(data) > SECRET_BYTES_MAX:
        raise ValueError(f"{path} has more than {SECRET_BYTES_MAX} bytes")
    if not secret:
        raise ValueError(f"{path} is empty")
    if not secret.isprintable():
        raise ValueError(f"{path} has more than one line, or characters that cannot be sent")
    return secret
