"""Reads and writes the files of NSQ's nsqd, to take over its data path and to give it back."""
