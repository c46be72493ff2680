"""Spark: `format("nsq")`, to read and to write, as batches and as streams.

`source` is where to begin reading. The package itself imports nothing, so that Spark's workers start quickly.
"""
