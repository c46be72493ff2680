"""This is `nsquark passwd`, which sets the roles and passwords of nsqadmin's users."""

import argparse
import contextlib
import fcntl
import getpass
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from nsquark.admin.passwords import (
    PASSWORD_CHARS_MAX,
    PasswordHash,
    User,
    Users,
    read_users,
    require_name,
    require_password,
    write_users,
)
from nsquark.admin.roles import Role
from nsquark.base.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="nsqadmin's --auth-file; it is made if it is not there")
    parser.add_argument("user", nargs="?", help="whose password is set; without a name, the users are listed")
    roles = [role.word for role in Role]
    parser.add_argument("--role", choices=roles, help="what they may do (default: as before, viewer for a new one)")
    parser.add_argument("--stdin", action="store_true", help="read the password from standard input, without asking")
    parser.add_argument("--delete", action="store_true", help="take the user out, which ends their sessions")
    parser.epilog = (
        "A viewer looks; an operator creates, pauses, publishes and seeks as well; an admin also empties, deletes and"
        " tombstones. nsqadmin reads the file again when it changes. A new password or role ends a user's sessions."
    )


def run(args: argparse.Namespace) -> int:
    path: Path = args.file
    try:
        if args.user is None:
            return _show(read_users(path))
        require_name(args.user)
        with _alone(path):
            users = read_users(path) if path.exists() else Users()
            return _delete(path, users, args.user) if args.delete else _set(path, users, args)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from None


def _show(users: Users) -> int:
    width = max(map(len, users.by_name), default=0)
    for user in sorted(users.by_name.values()):
        print(f"{user.name:{width}}  {user.role.word}")
    return 0


def _delete(path: Path, users: Users, name: str) -> int:
    if name not in users.by_name:
        raise UserError(f"there is no user {name} in {path}")
    write_users(path, users.without(name))
    print(f"{name} is taken out of {path}")
    return 0


def _set(path: Path, users: Users, args: argparse.Namespace) -> int:
    known = users.by_name.get(args.user)
    role = Role.parse(args.role) if args.role else known.role if known is not None else Role.VIEWER
    password = _from_stdin() if args.stdin else _asked(args.user)
    require_password(password)
    write_users(path, users.with_user(User(args.user, role, PasswordHash.of(password))))
    print(f"{args.user} is {role.word} in {path}")
    return 0


def _from_stdin() -> str:
    return sys.stdin.readline(PASSWORD_CHARS_MAX + 2).rstrip("\r\n")


def _asked(name: str) -> str:
    if not sys.stdin.isatty():
        raise UserError("there is no terminal to ask for the password: use --stdin")
    password = getpass.getpass(f"Password of {name}: ")
    if getpass.getpass("The same again: ") != password:
        raise UserError("these were two different passwords: nothing was changed")
    return password


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lets processes change the file one at a time: each replaces it as a whole, and would undo what another did."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)
