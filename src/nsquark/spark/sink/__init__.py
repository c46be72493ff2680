"""Writes to NSQ: rows become messages, at least once or exactly once."""
