"""Writes to NSQ from Spark: rows become messages, at least once or exactly once."""
