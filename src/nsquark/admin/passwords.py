"""Reads and writes the file of users: a line for each, with name, role and the scrypt hash of the password.

    session-key:<base64>
    alice:admin:scrypt:32768:8:1:<salt>:<hash>

The session key signs the cookies of users who logged in, so that they outlive a restart and are good at every nsqadmin
with the same file. Whoever reads the file could forge cookies, so it is for its owner alone.
"""

import base64
import binascii
import contextlib
import hashlib
import hmac
import os
import re
import secrets
import tempfile
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Self

from nsquark.admin.roles import Role

SCRYPT_N: Final = 1 << 15
SCRYPT_R: Final = 8
SCRYPT_P: Final = 1
SCRYPT_MEMORY_BYTES_MAX: Final = 256 << 20
SALT_BYTES: Final = 16
HASH_BYTES: Final = 32
KEY_BYTES: Final = 32
PASSWORD_CHARS_MIN: Final = 8
PASSWORD_CHARS_MAX: Final = 1024
NAME_CHARS_MAX: Final = 64
FILE_BYTES_MAX: Final = 1 << 20
SESSION_KEY: Final = "session-key"
"""This word begins the line of the key; no user can have it as a name."""

_NAME: Final = re.compile(r"[A-Za-z0-9._@+-]+")


class PasswordHash(NamedTuple):
    """Holds the scrypt hash of a password, from which the password cannot be read back."""

    n: int
    r: int
    p: int
    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, password: str) -> Self:
        salt = secrets.token_bytes(SALT_BYTES)
        return cls(SCRYPT_N, SCRYPT_R, SCRYPT_P, salt, _scrypt(password, salt, SCRYPT_N, SCRYPT_R, SCRYPT_P))

    def matches(self, password: str) -> bool:
        """Tells whether a password is the right one. It takes a tenth of a second on purpose, and as much memory as `n`
        and `r` say, so it is called in a thread.
        """
        if len(password) > PASSWORD_CHARS_MAX:
            return False
        return hmac.compare_digest(self.digest, _scrypt(password, self.salt, self.n, self.r, self.p))

    @classmethod
    def parse(cls, text: str) -> Self:
        kind, *fields = text.split(":")
        if kind != "scrypt" or len(fields) != 5:
            raise ValueError("no scrypt hash")
        n, r, p = (_positive(number) for number in fields[:3])
        if n < 2 or n & (n - 1) or 128 * n * r * p > SCRYPT_MEMORY_BYTES_MAX:
            raise ValueError("scrypt parameters out of range")
        salt, digest = _unbase64(fields[3]), _unbase64(fields[4])
        if len(salt) < 8 or len(digest) != HASH_BYTES:
            raise ValueError("no scrypt hash")
        return cls(n, r, p, salt, digest)

    def __str__(self) -> str:
        return f"scrypt:{self.n}:{self.r}:{self.p}:{_base64(self.salt)}:{_base64(self.digest)}"


class User(NamedTuple):
    """Holds one line of the file."""

    name: str
    role: Role
    password: PasswordHash

    @property
    def fingerprint(self) -> bytes:
        """Returns a hash that changes with the password and with the role, and so ends the sessions that began with
        other ones.
        """
        return hashlib.sha256(f"{self.name}:{self.role.word}:{self.password}".encode()).digest()[:16]


@dataclass(frozen=True)
class Users:
    """Holds all of a file. If the file has no session key, there is one that is lost with the process."""

    by_name: Mapping[str, User] = field(default_factory=dict)
    key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses the text of a file, or raises ValueError, which names the line and none of its secrets."""
        users: dict[str, User] = {}
        key = b""
        for number, line in enumerate(text.splitlines(), 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            try:
                if line.startswith(f"{SESSION_KEY}:"):
                    key = _parse_key(line)
                    continue
                user = _parse_user(line)
                if user.name in users:
                    raise ValueError(f"{user.name} is there twice")
                users[user.name] = user
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
        return cls(users, key) if key else cls(users)

    def __str__(self) -> str:
        lines = [f"{SESSION_KEY}:{_base64(self.key)}"]
        lines += [f"{user.name}:{user.role.word}:{user.password}" for user in self.by_name.values()]
        return "\n".join(lines) + "\n"

    def with_user(self, user: User) -> "Users":
        return Users({**self.by_name, user.name: user}, self.key)

    def without(self, name: str) -> "Users":
        return Users({other: user for other, user in self.by_name.items() if other != name}, self.key)


def require_name(name: str) -> None:
    if not 1 <= len(name) <= NAME_CHARS_MAX or not _NAME.fullmatch(name) or name == SESSION_KEY:
        raise ValueError(f"a name has 1 to {NAME_CHARS_MAX} letters, digits and . _ @ + -")


def require_password(password: str) -> None:
    if not PASSWORD_CHARS_MIN <= len(password) <= PASSWORD_CHARS_MAX:
        raise ValueError(f"a password has {PASSWORD_CHARS_MIN} to {PASSWORD_CHARS_MAX} characters")


def read_users(path: Path) -> Users:
    """Reads the file, or raises ValueError, which says what is wrong with it."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ValueError(f"more than {FILE_BYTES_MAX} bytes")
        return Users.parse(data.decode())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def write_users(path: Path, users: Users) -> None:
    """Replaces the file as a whole, so that a reader finds the old one or the new one.

    A new file is for its owner alone. One that is replaced keeps its owner and its group as far as the writer may set
    them, and with the group also the group's right to read it.
    """
    path = path.resolve()
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "w") as file:
            if path.exists():
                _keep_owner_and_group(file.fileno(), path.stat())
            file.write(str(users))
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _keep_owner_and_group(file: int, before: os.stat_result) -> None:
    with contextlib.suppress(PermissionError):  # only root and the members of a group may set it
        os.fchown(file, -1, before.st_gid)
    with contextlib.suppress(PermissionError):  # only root may change the owner
        os.fchown(file, before.st_uid, -1)
    has_same_group = os.fstat(file).st_gid == before.st_gid
    os.fchmod(file, before.st_mode & (0o640 if has_same_group else 0o600))


def _scrypt(password: str, salt: bytes, n: int, r: int, p: int) -> bytes:
    # An accented letter is one character on some keyboards and two on others, and must hash alike.
    secret = unicodedata.normalize("NFC", password).encode("utf-8", "surrogatepass")
    return hashlib.scrypt(secret, salt=salt, n=n, r=r, p=p, maxmem=2 * SCRYPT_MEMORY_BYTES_MAX, dklen=HASH_BYTES)


def _parse_key(line: str) -> bytes:
    key = _unbase64(line.partition(":")[2])
    if len(key) < KEY_BYTES:
        raise ValueError(f"the session key has less than {KEY_BYTES} bytes")
    return key


def _parse_user(line: str) -> User:
    name, role, password = (*line.split(":", 2), "", "")[:3]
    require_name(name)
    return User(name, Role.parse(role), PasswordHash.parse(password))


def _positive(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,9}", text):
        raise ValueError("scrypt parameters out of range")
    return int(text)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _unbase64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("no base64") from None
