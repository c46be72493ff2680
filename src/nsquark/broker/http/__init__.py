"""Answers nsqd's HTTP API: NSQ's part of it, and the log API."""
