"""Writing: rows become messages, at least once or exactly once."""
