"""Spark takes the `DefaultSource` of every top-level package named `pyspark_*`: so `format("nsq")` is just there."""

from nsquark.spark.source.datasource import NsqDataSource as DefaultSource

__all__ = ["DefaultSource"]
