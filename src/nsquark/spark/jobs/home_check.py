"""Refuses the directory of a pipeline whose parts do not fit together: it was moved, or a part is from a backup.

Spark's sink takes a batch for written by its number, its source knows the files it has read by their paths, and the
catalog knows tables by theirs. So after half of the directory was put back, or after it was moved, messages would be
missing or doubled without a word.
"""

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from nsquark.base.errors import UserError
from nsquark.spark.jobs.checkpoints import check_ages
from nsquark.spark.jobs.layout import SPARK_LOG
from nsquark.spark.jobs.sink_log import entries_in, last_batch, live_files

TABLE_PARTS = 3
"""A table's checkpoint is below catalog, database and table; that of a sink below the sink's name alone."""


@dataclass(frozen=True)
class FlowCheckpoint:
    """Names the checkpoint of a flow. Spark begins another version of it when the flow is computed anew."""

    destination: tuple[str, ...]
    """These are catalog, database and table, or the name of a sink."""
    path: Path

    @property
    def name(self) -> str:
        return self.destination[-1]

    @property
    def table(self) -> Path | None:
        """Returns the table's directory as it is in the warehouse, or None for a sink."""
        if len(self.destination) != TABLE_PARTS:
            return None
        database, table = (part.lower() for part in self.destination[1:])
        return Path(table) if database == "default" else Path(f"{database}.db", table)

    def is_among(self, names: Collection[str]) -> bool:
        """Tells whether one of the names, each written with or without catalog and database, is the destination."""
        parts = [name.strip().strip("`").lower().split(".") for name in names]
        own = [part.lower() for part in self.destination]
        return any(own[-len(named) :] == named for named in parts)

    def files_read(self) -> set[Path]:
        """Returns the files that the flow has read, if it reads tables. Other sources have logs of other kinds."""
        found: set[Path] = set()
        for log in (self.path / "sources").glob("*/[0-9]*"):
            with contextlib.suppress(UserError, ValueError, KeyError, TypeError):
                found |= {entry.path for entry in entries_in(log)}
        return found


def check_home(
    warehouse: Path, checkpoints: Path, *, anew: Collection[str] | None = (), has_all_tables: bool = True
) -> None:
    """Raises if the tables in `warehouse` do not fit the checkpoints. `anew` names what is about to be computed anew,
    and is None for all. `has_all_tables` says that the tables of these checkpoints, and no others, are in `warehouse`;
    else they may be elsewhere.
    """
    lists = {path.parent for path in warehouse.rglob(SPARK_LOG)}
    for table in lists:
        _check_place(table)
    if anew is None:
        return
    flows = list(_latest(checkpoints / "_checkpoints"))
    _check_one_flow_each([flow for flow in flows if flow.table and warehouse / flow.table in lists])
    kept = [flow for flow in flows if not flow.is_among(anew)]
    listed = {table: live_files(table) for table in lists}
    listed |= {warehouse / flow.table: set() for flow in flows if flow.table and flow not in kept}
    for flow in kept:
        if flow.table and (has_all_tables or warehouse / flow.table in lists):
            _check_flow(flow, warehouse / flow.table)
        _check_read(flow, listed)
    if has_all_tables:
        for table in lists - {warehouse / flow.table for flow in flows if flow.table}:
            if table.name not in anew:
                _check_same_age(checkpoints / "_checkpoints", table, table.name)


def _latest(root: Path) -> Iterator[FlowCheckpoint]:
    """Yields the newest version of each flow's checkpoint."""
    for place, names, _ in os.walk(root):
        versions = [int(name) for name in names if name.isdecimal()]
        if any((Path(place, str(version)) / "offsets").is_dir() for version in versions):
            names.clear()
            path = Path(place)
            yield FlowCheckpoint(path.relative_to(root).parts[:-1], path / str(max(versions)))


def _check_place(table: Path) -> None:
    for path in live_files(table):
        if not path.is_relative_to(table):
            raise UserError(
                f"table {table.name} in {table} was written as {path.parent}: Spark finds tables by their paths, and "
                "would use those there. Move --dir back to where it was, or begin with a new one"
            )


def _check_one_flow_each(flows: list[FlowCheckpoint]) -> None:
    """Raises if two flows write one table: of their batches with equal numbers, Spark's sink lists those of one."""
    writers: dict[tuple[str, ...], FlowCheckpoint] = {}
    for flow in flows:
        other = writers.setdefault(flow.destination, flow)
        if other is not flow:
            one, two = other.path.parent, flow.path.parent
            raise UserError(
                f"table {flow.name} is written by two flows, {one.name} and {two.name}: Spark's sink for files takes a "
                f"batch of one for that of the other, and rows are missing. Let one flow write it, with a UNION ALL, "
                f"and compute it anew with --full-refresh {flow.name}; of a flow that is no more, remove {one} or {two}"
            )


def _check_flow(flow: FlowCheckpoint, table: Path) -> None:
    if table.is_dir() and not (table / SPARK_LOG).is_dir() and any(table.iterdir()):
        return  # it has a format with a list of its own
    _check_same_age(flow.path, table, flow.name)


def _check_same_age(checkpoint: Path, table: Path, name: str) -> None:
    check_ages(
        str(checkpoint),
        str(table),
        begun=_last(checkpoint / "offsets"),
        done=_last(checkpoint / "commits"),
        written=last_batch(table),
        instead=f"compute it anew with --full-refresh {name}, from what nsqd still has",
    )


def _check_read(flow: FlowCheckpoint, listed: dict[Path, set[Path]]) -> None:
    """Raises if the flow has read files that their table does not have: those that it has instead would be read too."""
    for path in flow.files_read():
        table = next((parent for parent in path.parents if parent in listed), None)
        if table is not None and path not in listed[table]:
            raise UserError(
                f"{flow.name} has read {path.name} of table {table.name}, which is not in it: the table is older, or "
                f"computed anew, and {flow.name} would get its rows a second time. Put back --dir as a whole, or "
                f"compute {flow.name} anew too: --full-refresh {table.name},{flow.name}"
            )


def _last(directory: Path) -> int:
    names = (path.name for path in directory.glob("[0-9]*"))
    return max((int(name) for name in names if name.isdecimal()), default=-1)
