"""Contains NSQ's six command-line programs, built on the client library; see docs/tools.md."""
