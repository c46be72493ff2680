"""Reading the files of NSQ's nsqd, to take over its data path."""
