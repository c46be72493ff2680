"""Knows who may use nsqadmin: the users of a file, whose sessions are in cookies, or those of NSQ's header rule."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import os
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from nsquark.admin.options import NsqadminOptions, OptionsError
from nsquark.admin.passwords import (
    HASH_BYTES,
    SALT_BYTES,
    SCRYPT_N,
    SCRYPT_P,
    SCRYPT_R,
    PasswordHash,
    User,
    Users,
    read_users,
)
from nsquark.admin.roles import Identity, Role
from nsquark.admin.sessions import BrowserSession, BrowserSessions
from nsquark.admin.throttle import LoginThrottle
from nsquark.base.logs import Logger
from nsquark.web.browsers import BrowserGuard

LOGINS_AT_ONCE_MAX: Final = 2
"""At most this many logins are checked at once; each takes 32 MiB and a tenth of a second of a core."""
LOGINS_WAITING_MAX: Final = 16
FILE_CHECK_S: Final = 1.0
BASIC_CACHED_MAX: Final = 256
BASIC_CHARS_MAX: Final = 4096

_DECOY: Final = PasswordHash(SCRYPT_N, SCRYPT_R, SCRYPT_P, os.urandom(SALT_BYTES), os.urandom(HASH_BYTES))
"""This hash is checked when there is no such user, so that the refusal takes as long as that of a wrong password."""


class TooManyLogins(Exception):
    """Says that a password was not checked, after too many attempts to log in."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"too many attempts to log in: try again in {max(1, round(wait_s))} s")
        self.wait_s = max(1, round(wait_s))


class Accounts:
    """Keeps the users, their sessions and the counts of failed logins."""

    def __init__(self, options: NsqadminOptions, logger: Logger) -> None:
        self._logger = logger
        self._path = Path(options.auth_file) if options.auth_file else None
        self._header = options.acl_http_header
        self._admins = frozenset(options.admin_user)
        if self._path is not None and self._admins:
            raise OptionsError("use --auth-file or --admin-user not both")
        self.hosts = BrowserGuard("nsqadmin", options.http_allowed_hosts)
        self._seen: tuple[int, int, int] | None = None
        self._checked_s = 0.0
        self._users = Users()
        if self._path is not None:
            self._read_first(self._path)
        self.sessions = BrowserSessions(options.session_ttl.seconds)
        self.session_s = int(options.session_ttl.seconds)
        self._throttle = LoginThrottle()
        self._threads = ThreadPoolExecutor(LOGINS_AT_ONCE_MAX, thread_name_prefix="scrypt")
        self._logins = 0
        self._basic: OrderedDict[bytes, bytes] = OrderedDict()

    @property
    def needs_login(self) -> bool:
        return self._path is not None

    @property
    def key(self) -> bytes:
        """Returns the key that cookies are signed with."""
        return self.users.key

    # -- the file ----------------------------------------------------------------------------------------

    @property
    def users(self) -> Users:
        """Returns the users of the file as it is now: a user who is removed from it loses access within a second."""
        if self._path is not None and time.monotonic() - self._checked_s > FILE_CHECK_S:
            self._checked_s = time.monotonic()
            self._read_again(self._path)
        return self._users

    def _read_first(self, path: Path) -> None:
        try:
            self._users = read_users(path)
            self._seen = _state_of(path)
        except ValueError as error:
            raise OptionsError(f"--auth-file {error}") from None
        if not self._users.by_name:
            raise OptionsError(f"--auth-file {path} has no users: nsquark passwd {path} NAME --role admin")
        if path.stat().st_mode & 0o077:
            self._logger.warning(f"ACCESS: {path} can be read by others: chmod 600 {path}")

    def _read_again(self, path: Path) -> None:
        seen = _state_of(path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._users = read_users(path)
        except ValueError as error:
            self._logger.error(f"ACCESS: {error}; the users are those of before")
        else:
            self._logger.info(f"ACCESS: {path} was read again: {len(self._users.by_name)} users")

    # -- who asks ----------------------------------------------------------------------------------------

    def by_session(self, session: BrowserSession) -> Identity | None:
        user = self.users.by_name.get(session.user)
        if user is None or not hmac.compare_digest(user.fingerprint, session.fingerprint):
            return None
        return Identity(user.name, user.role)

    def by_header(self, value: str) -> Identity:
        """Decides by NSQ's rule: the users of --admin-user are admins, or everybody if none is named."""
        if not self._admins:
            return Identity("", Role.ADMIN)
        return Identity(value, Role.ADMIN if value in self._admins else Role.VIEWER)

    @property
    def header(self) -> str:
        return self._header

    async def by_basic(self, authorization: str, address: str) -> Identity | None:
        """Checks a program's `Authorization: Basic`. Good credentials are remembered, since a script may send them
        many times a second.
        """
        found = basic_credentials(authorization)
        if found is None:
            return None
        name, password = found
        shown = hmac.digest(self.key, f"basic\0{name}\0{password}".encode("utf-8", "surrogatepass"), "sha256")
        user = self.users.by_name.get(name)
        if user is None or self._basic.get(shown) != user.fingerprint:
            user = await self.log_in(name, password, address)
            if user is None:
                return None
            self._basic[shown] = user.fingerprint
            while len(self._basic) > BASIC_CACHED_MAX:
                self._basic.popitem(last=False)
        return Identity(user.name, user.role)

    async def log_in(self, name: str, password: str, address: str) -> User | None:
        """Returns the user if the password is right, else None. It raises TooManyLogins if it did not check."""
        wait_s = self._throttle.wait_s(address, name)
        if wait_s > 0:
            raise TooManyLogins(wait_s)
        if self._logins >= LOGINS_WAITING_MAX:
            raise TooManyLogins(1)
        self._throttle.failed(address, name)  # counted before the check, or many at once would get past the throttle
        self._logins += 1
        user = self.users.by_name.get(name)
        stored = user.password if user is not None else _DECOY
        try:
            is_right = await asyncio.get_running_loop().run_in_executor(self._threads, stored.matches, password)
        finally:
            self._logins -= 1
        if user is None or not is_right:
            shown = name if user is not None else "an unknown user"
            self._logger.always(f"AUDIT: login of {shown} from {address} failed")
            return None
        self._throttle.succeeded(address, name)
        self._logger.always(f"AUDIT: login of {name} from {address}: ok")
        return user


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def basic_credentials(authorization: str) -> tuple[str, str] | None:
    """Reads name and password of an `Authorization: Basic`; it returns None for anything else."""
    kind, _, value = authorization.partition(" ")
    if kind.lower() != "basic" or len(value) > BASIC_CHARS_MAX:
        return None
    try:
        name, colon, password = base64.b64decode(value.strip(), validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        return None
    return (name, password) if colon else None
