"""Has the names in directories that jobs write. Readers of Parquet pass over names that begin with an underscore."""

from typing import Final

CHECKPOINT: Final = "_checkpoint"
SPARK_LOG: Final = "_spark_metadata"
"""Spark's sink lists the files of an archive in Parquet here."""
DELTA_LOG: Final = "_delta_log"
COMPACTION: Final = "_compaction"
"""`nsquark compact-archive` keeps here what it has under way."""
LIST_EVERY_BATCHES: Final = 10
"""After this many batches Spark's sink lists all files of an archive anew, in one file."""
