"""Runs the Spark side: updates of the example pipeline, and what its tables hold."""

import asyncio
import os
import sys
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from examples.demo.platform import Platform
from examples.demo.traffic import id_in
from nsquark.spark.java import spark_environment
from nsquark.spark.jobs.progress import Progress, reports_in

PIPELINE = Path(__file__).parents[1] / "pipeline"
WATERMARK_DELAY = timedelta(seconds=10)
"""The pipeline's per_minute.sql has the same delay."""
LOG_POLL_S = 0.2


@dataclass(frozen=True)
class Tables:
    """Holds the pipeline's tables at one moment."""

    arrived: list[str]
    """Has the id of each row; redelivered ones are there more than once."""
    good: set[str]
    rejected: set[str]
    per_minute: dict[tuple[datetime, str], tuple[int, Decimal]]
    customers: dict[str, tuple[int, int, Decimal]]
    watermark: datetime | None
    """Minutes that end before it are closed."""


class Lake:
    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._session: Any = None
        self.batches: list[Progress] = []
        self._is_ended = threading.Event()
        self._follower = threading.Thread(target=self._follow, name="progress", daemon=True)
        self._follower.start()

    async def update(self) -> float:
        """Runs one update of the pipeline against the running server; returns the seconds it took."""
        started = time.monotonic()
        command = [sys.executable, "-m", "nsquark.tool.main", "pipeline", "run", "--spec", str(PIPELINE)]
        command += ["--remote", self._platform.spark.url, "--dir", str(self._platform.spark.home.directory)]
        command += ["--conf", f"events.nsqd={','.join(self._platform.nsqds('http'))}"]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"the pipeline failed:\n{said.decode(errors='replace')}")
        return time.monotonic() - started

    async def read(self) -> Tables:
        return await asyncio.to_thread(self._read)

    def _read(self) -> Tables:
        if self._session is None:
            os.environ.update(spark_environment())
            from pyspark.sql import SparkSession

            self._session = SparkSession.builder.remote(self._platform.spark.url).getOrCreate()
            self._session.conf.set("spark.sql.session.timeZone", "UTC")
        spark = self._session
        for table in ("arrivals", "events", "per_minute", "customers"):
            spark.catalog.refreshTable(table)  # the update ran in another session
        arrivals = spark.table("arrivals").selectExpr("body", "reason IS NULL AS is_good").toArrow().to_pylist()
        newest = spark.table("events").selectExpr("max(time) AS time").toArrow().to_pylist()[0]["time"]
        minutes = spark.table("per_minute").toArrow().to_pylist()
        customers = spark.table("customers").toArrow().to_pylist()
        return Tables(
            arrived=[id_in(row["body"]) for row in arrivals],
            good={id_in(row["body"]) for row in arrivals if row["is_good"]},
            rejected={id_in(row["body"]) for row in arrivals if not row["is_good"]},
            per_minute={
                (row["minute"].astimezone(UTC), row["kind"]): (row["events"], row["amount"] or Decimal(0))
                for row in minutes
            },
            customers={row["user"]: (row["orders"], row["clicks"], row["spent"]) for row in customers},
            watermark=newest.astimezone(UTC) - WATERMARK_DELAY if newest else None,
        )

    def _follow(self) -> None:
        """Returns the rows of each micro-batch, from the server's log."""
        with self._platform.spark.log.open(errors="replace") as log:
            lines = iter(lambda: self._next_line(log), "")
            for report in reports_in(lines):
                self.batches.append(Progress.from_report(report))

    def _next_line(self, log: Any) -> str:
        """Returns a whole line, or nothing when it is over."""
        line = ""
        while not self._is_ended.is_set():
            line += log.readline()
            if line.endswith("\n"):
                return line
            time.sleep(LOG_POLL_S)
        return ""

    def close(self) -> None:
        self._is_ended.set()
        self._follower.join()
        if self._session is not None:
            self._session.stop()
