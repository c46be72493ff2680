"""Checks the file of users: what it takes, what it refuses, and that it says nothing of passwords."""

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsquark.admin.passwords import (
    KEY_BYTES,
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

OWNER, WRITER = 65_001, 65_002
OUR_GROUP, OTHER_GROUP = 65_101, 65_102

ALICE = User("alice", Role.ADMIN, PasswordHash.of("correct horse"))


def test_only_the_password_matches() -> None:
    assert ALICE.password.matches("correct horse")
    for wrong in ("", "correct hors", "correct horse ", "Correct horse", "x" * (PASSWORD_CHARS_MAX + 1)):
        assert not ALICE.password.matches(wrong)


def test_the_same_password_never_looks_the_same() -> None:
    assert PasswordHash.of("correct horse").digest != ALICE.password.digest


def test_a_letter_is_the_same_however_it_was_typed() -> None:
    assert PasswordHash.of("gro\u00dfe gr\u00f6\u00dfe").matches("gro\u00dfe gro\u0308\u00dfe")


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "users"
    users = Users().with_user(ALICE).with_user(ALICE._replace(name="bob", role=Role.VIEWER))
    write_users(path, users)
    assert read_users(path) == users
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "correct" not in path.read_text()
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """Makes a folder in which any user may replace files; pytest's own folders are for one user."""
    if os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


def write_as(user: int, groups: list[int], path: Path) -> None:
    """Writes the file in a process of this user, whose first group is that of the files it makes."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups(groups)
            os.setgid(groups[0])
            os.setuid(user)
            write_users(path, Users().with_user(ALICE))
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("writer", "groups", "mode", "kept"),
    [
        (0, [0], 0o640, (OWNER, OUR_GROUP, 0o640)),
        (OWNER, [OUR_GROUP], 0o640, (OWNER, OUR_GROUP, 0o640)),
        (OWNER, [OTHER_GROUP, OUR_GROUP], 0o640, (OWNER, OUR_GROUP, 0o640)),
        (WRITER, [OTHER_GROUP, OUR_GROUP], 0o640, (WRITER, OUR_GROUP, 0o640)),
        (OWNER, [OTHER_GROUP], 0o640, (OWNER, OTHER_GROUP, 0o600)),
        (WRITER, [OTHER_GROUP], 0o640, (WRITER, OTHER_GROUP, 0o600)),
        (OWNER, [OUR_GROUP], 0o666, (OWNER, OUR_GROUP, 0o640)),
    ],
)
def test_a_group_reads_the_file_only_if_it_did_before(
    shared_folder: Path, writer: int, groups: list[int], mode: int, kept: tuple[int, int, int]
) -> None:
    path = shared_folder / "users"
    path.write_text("")
    os.chown(path, OWNER, OUR_GROUP)
    path.chmod(mode)
    write_as(writer, groups, path)
    now = path.stat()
    assert (now.st_uid, now.st_gid, stat.S_IMODE(now.st_mode)) == kept


def test_a_fingerprint_changes_with_password_and_role() -> None:
    others = [ALICE._replace(role=Role.VIEWER), ALICE._replace(password=PasswordHash.of("correct horse"))]
    assert len({user.fingerprint for user in (ALICE, *others)}) == 3


def test_without_a_key_in_the_file_there_is_a_new_one_for_each_process() -> None:
    text = f"# our people\n\nalice:admin:{ALICE.password}\n"
    first, second = Users.parse(text), Users.parse(text)
    assert first.by_name == second.by_name == {"alice": ALICE}
    assert first.key != second.key
    assert len(first.key) == KEY_BYTES


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("alice", "line 1: there is no role"),
        ("\nalice:root:scrypt", "line 2: there is no role 'root': viewer, operator or admin"),
        ("alice:admin:plain", "line 1: no scrypt hash"),
        ("alice:admin:HASH\nalice:viewer:HASH", "line 2: alice is there twice"),
        ("a b:admin:HASH", "line 1: a name has"),
        (":admin:HASH", "line 1: a name has"),
        ("session-key:AAAA", "line 1: the session key has less than 32 bytes"),
        ("session-key:~~~", "line 1: no base64"),
        ("alice:admin:scrypt:16777216:8:8:AAAAAAAAAAAAAAAA:AAAA", "line 1: scrypt parameters out of range"),
        ("alice:admin:scrypt:1000:8:1:AAAAAAAAAAAAAAAA:AAAA", "line 1: scrypt parameters out of range"),
        ("alice:admin:scrypt:-2:8:1:AAAAAAAAAAAAAAAA:AAAA", "line 1: scrypt parameters out of range"),
    ],
)
def test_a_bad_line_is_named(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match="line") as caught:
        Users.parse(text.replace("HASH", str(ALICE.password)))
    assert str(caught.value).startswith(reason)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere cannot be read: No such file"):
        read_users(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="binary is no text"):
        read_users(tmp_path / "binary")


def test_names_and_passwords_have_limits() -> None:
    for name in ("", "x" * 65, "a:b", "a b", "a\nb", "session-key", "<b>"):
        with pytest.raises(ValueError, match="a name has"):
            require_name(name)
    require_name("ann.lee+test@example.org")
    for password in ("short", "x" * (PASSWORD_CHARS_MAX + 1)):
        with pytest.raises(ValueError, match="a password has"):
            require_password(password)
