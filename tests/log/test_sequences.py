"""Checks that no sequence number is ever handed out twice."""

import errno
import os
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from log.rig import fail_directory_syncs
from nsquark.log import sequences
from nsquark.log.sequences import LEASE_SEQS_MAX, LEASE_SEQS_MIN, SEQS_END, Sequences


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sequence"


def opened(
    path: Path, above: int = 0, reports: list[str] | None = None, reserve_seqs: int = sequences.RESERVE_SEQS
) -> Sequences:
    return Sequences(path, above, reports.append if reports is not None else lambda text: None, reserve_seqs)


def freeze_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(sequences.time, "time", lambda: seconds)


def test_leases_are_aligned_and_do_not_overlap(path: Path) -> None:
    source = opened(path)
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
    assert opened(path, named).lease(1)[0] >= named


def test_a_crash_hands_out_nothing_again(path: Path) -> None:
    _, end = opened(path).lease(LEASE_SEQS_MAX)
    assert opened(path).lease(1)[0] >= end  # the first was never closed


def test_a_clock_that_went_back_hands_out_nothing_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, end = opened(path).lease(1)
    for seconds in (time.time() - 1_000_000, 0.0, -5.0):
        freeze_clock(monkeypatch, seconds)
        low, high = opened(path).lease(1)
        assert low >= end
        end = high


def test_a_lost_file_is_made_up_for_by_the_clock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freeze_clock(monkeypatch, 1_900_000_000.0)
    _, end = opened(path).lease(1)
    path.unlink()
    freeze_clock(monkeypatch, 1_900_000_060.0)
    assert opened(path).lease(1)[0] >= end


@pytest.mark.parametrize("damage", ["flipped", "zeroed", "cut to nothing", "cut", "both flipped"])
def test_a_damaged_file_is_made_anew_above_all_that_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    freeze_clock(monkeypatch, 0.0)
    source = opened(path)
    if damage in ("cut", "both flipped"):
        source.close()
        source = opened(path)  # now both places are written
    _, end = source.lease(LEASE_SEQS_MAX)
    raw = bytearray(path.read_bytes())
    if damage == "zeroed":
        raw[:] = bytes(len(raw))
    elif damage.startswith("cut"):
        del raw[20 if damage == "cut" else 0 :]
    else:
        raw[len(raw) // 2 + 5] ^= 1
        raw[5] ^= 1
    path.write_bytes(raw)
    reports: list[str] = []
    assert opened(path, end, reports).lease(1)[0] >= end
    assert str(path) in reports[0]
    reports.clear()
    opened(path, end, reports)
    assert not reports


@pytest.mark.parametrize("place", [0, 1])
def test_one_damaged_place_hands_out_nothing_again(path: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    freeze_clock(monkeypatch, 0.0)
    opened(path).close()
    _, end = opened(path).lease(LEASE_SEQS_MAX)
    raw = bytearray(path.read_bytes())
    raw[place * 24 : (place + 1) * 24] = bytes(24)
    path.write_bytes(raw)
    assert opened(path).lease(1)[0] >= end


def test_a_file_that_cannot_be_read_is_set_aside_and_made_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freeze_clock(monkeypatch, 0.0)
    _, end = opened(path).lease(1)
    before = path.read_bytes()

    def pread(*_args: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    reports: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread)
        source = opened(path, end, reports)
    assert source.lease(1)[0] >= end
    assert "cannot be read" in reports[0]
    assert path.with_name("sequence.bad").read_bytes() == before


@pytest.mark.parametrize("step", ["os.replace", "os.unlink"])
def test_a_file_that_cannot_be_read_has_its_name_until_another_is_durable(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Without a file, numbers would start below those that were reserved."""
    freeze_clock(monkeypatch, 0.0)
    _, end = opened(path).lease(1)
    before = path.read_bytes()

    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", refuse)
        patch.setattr(step, refuse)
        source = opened(path, end)
        if step == "os.replace":
            with pytest.raises(OSError, match="Input/output error"):
                source.lease(1)
            assert path.read_bytes() == before
    low, end = source.lease(1)
    assert path.read_bytes() != before
    assert low > sequences.RESERVE_SEQS and opened(path).lease(1)[0] >= end


def test_a_name_that_could_not_be_synced_is_given_to_another_file(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_directory_syncs(patch, tmp_path)
        source = opened(path)
        with pytest.raises(OSError, match="Input/output error"):
            source.lease(1)
    before = path.stat().st_ino
    source.lease(1)
    assert path.stat().st_ino != before, "a second sync of the same name would mean nothing"


@pytest.mark.parametrize("year", [2099, 2101, 2157, 9000])
def test_a_clock_far_ahead_does_not_use_up_the_numbers(path: Path, monkeypatch: pytest.MonkeyPatch, year: int) -> None:
    """Message ids have 53 bits for a number."""
    freeze_clock(monkeypatch, (year - 1970) * 365.2425 * 86_400)
    reports: list[str] = []
    _, end = opened(path, 0, reports).lease(LEASE_SEQS_MAX)
    assert end < SEQS_END // 4 * 3
    assert bool(reports) == (year > 2100)
    freeze_clock(monkeypatch, 1_900_000_000.0)
    assert end <= opened(path).lease(1)[0] < SEQS_END // 4 * 3


def test_when_the_numbers_are_used_up_none_is_handed_out(path: Path) -> None:
    with pytest.raises(OSError, match="used up"):
        opened(path, SEQS_END - 10).lease(1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(leases=st.lists(st.one_of(st.integers(1, LEASE_SEQS_MAX), st.just("crash")), max_size=40))
def test_no_number_twice_whatever_happens(tmp_path_factory: pytest.TempPathFactory, leases: list[int | str]) -> None:
    """The reserve is small, so that it is extended often."""
    file = tmp_path_factory.mktemp("sequences") / "sequence"
    with pytest.MonkeyPatch.context() as patch:
        freeze_clock(patch, 0.0)
        source, end = opened(file, reserve_seqs=2 * LEASE_SEQS_MAX), 0
        for count in leases:
            if isinstance(count, str):
                source.close()
                source = opened(file, reserve_seqs=2 * LEASE_SEQS_MAX)
            else:
                low, high = source.lease(count)
                assert low >= end
                end = high
        source.close()


def test_numbers_end_where_the_disk_refuses_to_reserve_more(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(path, reserve_seqs=LEASE_SEQS_MAX)

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
    assert low < end <= opened(path).lease(1)[0]
