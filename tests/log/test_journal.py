"""A channel's journal: what was appended is there, up to where a crash tore it."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from nsquark.kernel.ledger import JOURNAL_RECORD
from nsquark.log import journal as journal_module
from nsquark.log.journal import Journal


def record(number: int) -> bytes:
    return JOURNAL_RECORD.pack(1, 1, 1, number, 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def loaded(path: Path) -> bytes:
    return Journal(path).load()


def test_a_channel_without_a_journal_has_no_records(path: Path) -> None:
    assert loaded(path) == b""
    assert not path.exists()


def test_records_come_back_in_order_over_restarts(path: Path) -> None:
    for number in range(3):
        journal = Journal(path)
        journal.load()
        journal.append(record(2 * number))
        journal.append(record(2 * number + 1))
        journal.close()
    assert loaded(path) == b"".join(record(number) for number in range(6))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5), data=st.data())
def test_a_cut_or_flipped_byte_costs_only_what_follows(tmp_path: Path, sizes: list[int], data: st.DataObject) -> None:
    path = tmp_path / "damaged"
    path.unlink(missing_ok=True)
    journal, ends = Journal(path), [0]
    for index, size in enumerate(sizes):
        journal.append(record(index) * size)
        ends.append(journal.size)
    raw = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw[position] ^= data.draw(st.integers(1, 255))
    else:
        del raw[position:]
    path.write_bytes(raw)
    kept = sum(end <= position for end in ends) - 1
    again = Journal(path)
    assert again.load() == b"".join(record(index) * size for index, size in enumerate(sizes[:kept]))
    again.append(record(99))
    again.close()
    assert loaded(path).endswith(record(99))


def test_rewriting_replaces_everything(path: Path) -> None:
    journal = Journal(path)
    journal.append(record(1))
    journal.rewrite(record(2))
    journal.append(record(3))
    assert loaded(path) == record(2) + record(3)
    journal.rewrite(b"")
    assert not path.exists()
    journal.append(record(4))
    assert loaded(path) == record(4)
    journal.delete()
    assert not path.exists()


def test_is_rewritten_when_most_of_it_is_out_of_date(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "COMPACT_BYTES_MIN", 100)
    journal = Journal(path)
    assert not journal.wants_rewrite(0)
    journal.append(record(1) * 10)
    assert journal.wants_rewrite(0)
    assert not journal.wants_rewrite(10)
    journal.append(record(1) * 35)
    assert journal.wants_rewrite(10)
    journal.rewrite(record(1) * 10)
    assert not journal.wants_rewrite(10)


@pytest.mark.parametrize("written", [0, 5, 30])
def test_a_failed_append_leaves_what_was_there_and_can_be_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    journal = Journal(path)
    journal.append(record(1))
    real = journal_module.write_all

    def short(fd: int, data: bytes, offset: int) -> None:
        real(fd, data[:written], offset)
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "write_all", short)
        with pytest.raises(OSError, match="no space"):
            journal.append(record(2) * 5)
    assert loaded(path) == record(1)
    journal.append(record(2))
    assert loaded(path) == record(1) + record(2)
