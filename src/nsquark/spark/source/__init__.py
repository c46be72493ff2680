"""Reads from NSQ: offsets, plans, and what a task streams from nsqd."""
