"""Checks `nsquark passwd`: what it writes, what it refuses, and that passwords are nowhere to be seen."""

import os
import pty
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nsquark.admin.passwords import read_users
from nsquark.admin.roles import Role

from .conftest import NSQUARK, RUN_TIMEOUT_S, nsquark


def passwd(path: Path, *arguments: str, password: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*NSQUARK, "passwd", str(path), *arguments],
        input=f"{password}\n",
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "users"


def test_users_come_change_and_go(path: Path) -> None:
    made = passwd(path, "alice", "--role", "admin", "--stdin", password="correct horse")
    assert (made.returncode, made.stdout) == (0, f"alice is admin in {path}\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = read_users(path).key
    assert passwd(path, "bob", "--stdin", password="battery staple").returncode == 0
    assert passwd(path, "alice", "--stdin", password="another horse").returncode == 0
    users = read_users(path)
    assert users.key == key
    assert users.by_name["alice"].role is Role.ADMIN
    assert users.by_name["alice"].password.matches("another horse")
    assert users.by_name["bob"].role is Role.VIEWER
    assert passwd(path).stdout == "alice  admin\nbob    viewer\n"
    assert passwd(path, "alice", "--delete").stdout == f"alice is taken out of {path}\n"
    assert set(read_users(path).by_name) == {"bob"}
    assert not any(word in path.read_text() for word in ("horse", "staple"))


def test_a_password_is_asked_for_twice_and_not_shown(path: Path) -> None:
    for second, code in (("correct horse", 0), ("correct hose", 1)):
        answer, shown = _at_a_terminal([*NSQUARK, "passwd", str(path), "alice"], "correct horse", second)
        assert answer == code, shown
        assert "Password of alice" in shown
        assert "horse" not in shown
    assert "two different passwords" in shown
    assert read_users(path).by_name["alice"].password.matches("correct horse")


def _at_a_terminal(command: list[str], *typed: str) -> tuple[int, str]:
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        shown = b""
        for line in typed:
            while not shown.endswith(b": "):
                shown += os.read(ours, 1000)
            os.write(ours, line.encode() + b"\n")
            shown += b"\n"
        try:
            while piece := os.read(ours, 1000):
                shown += piece
        except OSError:  # the other side is closed
            pass
        code = process.wait(RUN_TIMEOUT_S)
    os.close(ours)
    return code, shown.decode()


@pytest.mark.parametrize(
    ("arguments", "password", "sentence"),
    [
        (("alice", "--stdin"), "short", "a password has 8 to 1024 characters"),
        (("a:b", "--stdin"), "correct horse", "a name has 1 to 64 letters"),
        (("alice",), "correct horse", "there is no terminal to ask for the password: use --stdin"),
        (("alice", "--delete"), "", "there is no user alice in "),
        ((), "", "cannot be read: No such file"),
    ],
)
def test_mistakes_are_sentences(path: Path, arguments: tuple[str, ...], password: str, sentence: str) -> None:
    result = passwd(path, *arguments, password=password)
    assert result.returncode == 1
    assert result.stderr.startswith("nsquark passwd: ")
    assert sentence in result.stderr
    assert not path.exists()


def test_an_unknown_role_is_answered_with_the_known_ones(path: Path) -> None:
    result = nsquark("passwd", str(path), "alice", "--role", "root")
    assert result.returncode == 2
    assert all(role.word in result.stderr for role in Role)


def test_a_file_that_is_no_list_of_users_is_left_alone(path: Path) -> None:
    path.write_text("important\n")
    assert "line 1: " in passwd(path, "alice", "--stdin", password="correct horse").stderr
    assert path.read_text() == "important\n"


def test_several_at_once_do_not_undo_each_other(path: Path) -> None:
    names = [f"user{number}" for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda name: passwd(path, name, "--stdin", password="correct horse"), names))
    assert sorted(read_users(path).by_name) == names
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_its_group_may_read_stays_so(path: Path) -> None:
    passwd(path, "alice", "--stdin", password="correct horse")
    path.chmod(0o640)
    passwd(path, "bob", "--stdin", password="correct horse")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_it_needs_nothing_of_the_web(path: Path) -> None:
    """nsqadmin's own libraries may be missing where passwords are set."""
    code = "import sys, nsquark.tool.passwd; sys.exit(any(name in sys.modules for name in ('aiohttp', 'jinja2')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=RUN_TIMEOUT_S).returncode == 0
