"""Has NSQ's six command-line programs, on the client library; see docs/tools.md."""
