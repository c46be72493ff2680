"""Sequence numbers: none is ever handed out twice."""

import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from nsquark.log import sequences
from nsquark.log.sequences import LEASE_SEQS_MAX, LEASE_SEQS_MIN, SequenceFileDamaged, Sequences


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sequence"


def freeze_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(sequences.time, "time", lambda: seconds)


def test_leases_are_aligned_and_do_not_overlap(path: Path) -> None:
    source = Sequences(path, 0)
    end = 0
    for count in (1, LEASE_SEQS_MIN, LEASE_SEQS_MIN + 1, LEASE_SEQS_MAX, 10 * LEASE_SEQS_MAX):
        low, high = source.lease(count)
        assert low >= end
        assert low % LEASE_SEQS_MIN == high % LEASE_SEQS_MIN == 0
        assert min(count, LEASE_SEQS_MAX) <= high - low <= LEASE_SEQS_MAX
        end = high
    source.close()


def test_starts_above_what_logs_and_cursors_name(path: Path) -> None:
    named = 1 << 52
    assert Sequences(path, named).lease(1)[0] >= named


def test_a_crash_hands_out_nothing_again(path: Path) -> None:
    _, end = Sequences(path, 0).lease(LEASE_SEQS_MAX)
    assert Sequences(path, 0).lease(1)[0] >= end  # the first was never closed


def test_a_clock_that_went_back_hands_out_nothing_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, end = Sequences(path, 0).lease(1)
    for seconds in (time.time() - 1_000_000, 0.0, -5.0):
        freeze_clock(monkeypatch, seconds)
        low, high = Sequences(path, 0).lease(1)
        assert low >= end
        end = high


def test_a_lost_file_is_made_up_for_by_the_clock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freeze_clock(monkeypatch, 1_900_000_000.0)
    _, end = Sequences(path, 0).lease(1)
    path.unlink()
    freeze_clock(monkeypatch, 1_900_000_060.0)
    assert Sequences(path, 0).lease(1)[0] >= end


@pytest.mark.parametrize("position", [0, 5, 10, 20])
def test_a_damaged_file_is_refused_with_advice(path: Path, position: int) -> None:
    Sequences(path, 0)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 + position] ^= 1  # of the one slot that was written so far
    path.write_bytes(raw)
    with pytest.raises(SequenceFileDamaged, match="restore it from a backup"):
        Sequences(path, 0)


@pytest.mark.parametrize("size", [1, 23, 24, 47])
def test_a_cut_file_is_refused(path: Path, size: int) -> None:
    Sequences(path, 0)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(SequenceFileDamaged):
        Sequences(path, 0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(leases=st.lists(st.one_of(st.integers(1, LEASE_SEQS_MAX), st.just("crash")), max_size=40))
def test_no_number_twice_whatever_happens(tmp_path_factory: pytest.TempPathFactory, leases: list[int | str]) -> None:
    """With a small reserve, so that it is extended often."""
    file = tmp_path_factory.mktemp("sequences") / "sequence"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "RESERVE_SEQS", 2 * LEASE_SEQS_MAX)
        freeze_clock(patch, 0.0)
        source, end = Sequences(file, 0), 0
        for count in leases:
            if isinstance(count, str):
                source.close()
                source = Sequences(file, 0)
            else:
                low, high = source.lease(count)
                assert low >= end
                end = high
        source.close()


def test_numbers_end_where_the_disk_refuses_to_reserve_more(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "RESERVE_SEQS", LEASE_SEQS_MAX)
    source = Sequences(path, 0)

    def full(*_args: object, **_options: object) -> None:
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sequences, "write_all", full)
        patch.setattr(sequences.threading, "excepthook", lambda _: None)
        low, end = source.lease(LEASE_SEQS_MAX)
        with pytest.raises(OSError, match="no space"):
            source.lease(1)
    assert source.lease(1)[0] >= end
    source.close()
    assert low < end <= Sequences(path, 0).lease(1)[0]
