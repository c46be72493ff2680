"""Keeps the directory of a pipeline: its checkpoints and tables, and the catalog by which the next run knows them."""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyspark

from nsquark.base.errors import UserError

JAVA_OPTIONS = "spark.driver.extraJavaOptions"
WAREHOUSE = "spark.sql.warehouse.dir"

LOG_SETTINGS = """\
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{yy/MM/dd HH:mm:ss} %p %c{1}: %m%n%ex
logger.progress.name = org.apache.spark.sql.execution.streaming.runtime.ProgressReporter
logger.progress.level = info
logger.hive.name = org.apache.hadoop.hive.conf.HiveConf
logger.hive.level = error
logger.connect.name = org.apache.spark.sql.connect.utils.ErrorUtils
logger.connect.level = off
"""
"""Spark's own default hides the progress of queries, which it logs at INFO among much else."""


class PipelineHome:
    """Prepares and locks the directory of a pipeline. Always: one Spark at a time uses it. The metastore sees to that
    too, with an error that nobody understands.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.checkpoints = self.directory / "checkpoints"
        self.warehouse = self.directory / "warehouse"
        self._metastore = self.directory / "metastore"

    def prepare(self, of_user: Mapping[str, str]) -> None:
        """Makes the directory. Refuses one that was moved: its catalog would have Spark use the tables at the old path,
        or make them there.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        if WAREHOUSE not in of_user:
            self._check_place()
        self._log_settings.write_text(LOG_SETTINGS, encoding="utf-8")

    def _check_place(self) -> None:
        note, here = self.directory / "path", os.fsencode(self.directory)
        made_at = note.read_bytes() if note.exists() and self._metastore.exists() else b""
        if not made_at:
            note.write_bytes(here)
        elif made_at != here:
            raise UserError(
                f"{self.directory} was made as {os.fsdecode(made_at)}: its catalog finds tables by their paths, and "
                "Spark would use those there. Move --dir back to where it was, or begin with a new one"
            )

    def settings(self, of_user: Mapping[str, str]) -> dict[str, str]:
        """Returns settings for Spark's command line. The catalog is kept on disk: Spark's default one is in memory, and
        the second run would not know the tables.
        """
        java_options = (
            f"-Dlog4j2.configurationFile={self._log_settings.as_uri()} -Dderby.stream.error.file={os.devnull}"
            f" {of_user.get(JAVA_OPTIONS, '')}"
        )
        return {
            "spark.sql.catalogImplementation": "hive",
            WAREHOUSE: str(self.warehouse),
            "spark.hadoop.javax.jdo.option.ConnectionURL": (f"jdbc:derby:;databaseName={self._metastore};create=true"),
            "spark.ui.showConsoleProgress": "false",
            **of_user,
            JAVA_OPTIONS: java_options.rstrip(),
        }

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"another run uses {self.directory}: wait for it, or give this one its own --dir"
                ) from None
            yield

    @property
    def _log_settings(self) -> Path:
        return self.directory / "log4j2.properties"


def spark_program(name: str) -> str:
    """Returns the path of a program of the Spark in use: SPARK_HOME's, else that of the installed pyspark."""
    home = os.environ.get("SPARK_HOME") or str(Path(pyspark.__file__).parent)
    return str(Path(home) / "bin" / name)
