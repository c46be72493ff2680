"""Has ready jobs on Spark, each a command of `nsquark`: pipeline, archive, compact-archive, rollup, replay, report."""
