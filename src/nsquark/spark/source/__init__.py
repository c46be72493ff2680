"""Reads from NSQ for Spark: plans what a batch or stream reads, and streams ranges of the log from nsqd in tasks."""
