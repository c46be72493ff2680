"""Keeps a topic's log: append-only files of records, the memory over their tail, and the cursors that read them."""
