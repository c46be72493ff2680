"""Reads what Spark keeps in a checkpoint, and refuses one that is not as old as the output of its query.

A batch has a number, and Spark's own sink takes a number that it has for done. After a backup of the checkpoint was put
back, the same number stands for other messages, which would be lost; after one of the output, messages that the
checkpoint takes for written are missing.
"""

import json
import re
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from nsquark.base.errors import UserError
from nsquark.spark.jobs.layout import SPARK_LOG
from nsquark.spark.source.offsets import INITIAL, Offset

NUMBERED = r"/(\d+)$"
LISTED = re.compile(r"(\d+)(?:\.compact)?")


def read_lines(spark: SparkSession, path: str) -> list[str]:
    """Returns the lines of a small file or directory, none if it is not there. Spark reads it: only Spark may reach it.

    The lines are in order if there is one file.
    """
    try:
        return [str(row.value) for row in spark.read.text(path).collect()]
    except AnalysisException:
        return []


def last_number(spark: SparkSession, directory: str, pattern: str) -> int:
    """Returns the highest number in the paths of the files of a directory, found by a pattern, or -1."""
    try:
        paths = spark.read.format("binaryFile").load(directory).inputFiles()
    except AnalysisException:
        return -1
    return max((int(found[1]) for path in paths if (found := re.search(pattern, path))), default=-1)


def offset_before(spark: SparkSession, checkpoint: str, batch: int) -> Offset:
    """Returns where a batch begins, which is where the batch before it ends."""
    return offset_of(spark, checkpoint, batch - 1) if batch else INITIAL


def offset_of(spark: SparkSession, checkpoint: str, batch: int) -> Offset:
    """Returns where a batch ends. Spark writes it into the checkpoint before the batch runs."""
    path = f"{checkpoint}/offsets/{batch}"
    lines = read_lines(spark, path)
    if not lines:
        raise UserError(f"{path} is missing: put it back, or use another checkpoint")
    # The lines are a version, settings of Spark's, and the offset of each source, of which jobs have one.
    return Offset.parse(json.loads(lines[-1]))


def check_not_older(spark: SparkSession, checkpoint: str, output: str, written: int) -> None:
    """Raises if the output has a batch, `written` being its last, that its checkpoint does not know."""
    check_ages(checkpoint, output, begun=last_number(spark, f"{checkpoint}/offsets", NUMBERED), written=written)


def check_listed(spark: SparkSession, checkpoint: str, output: str) -> None:
    """Raises if what Spark's own sink wrote and its checkpoint are not of the same age. Spark Connect cannot tell."""
    if is_remote():
        return
    check_ages(
        checkpoint,
        output,
        begun=last_number(spark, f"{checkpoint}/offsets", NUMBERED),
        done=last_number(spark, f"{checkpoint}/commits", NUMBERED),
        written=_last_listed(spark, f"{output}/{SPARK_LOG}"),
    )


def check_ages(
    checkpoint: str,
    output: str,
    *,
    begun: int,
    written: int,
    done: int = -1,
    instead: str = "write to another directory with another checkpoint",
) -> None:
    """Raises if the last batch that is `written` to the output is not one that its checkpoint has begun, or is before
    one that its checkpoint takes for done. `instead` is what a user can do who has no backup that fits.
    """
    if written > begun:
        raise UserError(
            f"{checkpoint} is older than {output}, or new: it knows {_batches(begun)}, and {output} has them up to "
            f"{written}, with other messages. Put back the checkpoint that belongs to it, or {instead}"
        )
    if written < done:
        raise UserError(
            f"{output} is older than its checkpoint {checkpoint}, or another: it has {_batches(written)}, and those up "
            f"to {done} count as written. Put back the output that belongs to it, or {instead}"
        )


def _last_listed(spark: SparkSession, directory: str) -> int:
    """Returns the last batch in the list of Spark's sink, or -1. Hadoop lists it, since Spark passes over its names."""
    jvm: Any = spark.sparkContext._jvm
    path = jvm.org.apache.hadoop.fs.Path(directory)
    files = path.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())
    names = [file.getPath().getName() for file in files.listStatus(path)] if files.exists(path) else []
    return max((int(found[1]) for name in names if (found := LISTED.fullmatch(name))), default=-1)


def _batches(last: int) -> str:
    return f"batches up to {last}" if last >= 0 else "no batch"
