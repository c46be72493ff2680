"""NSQ in Python, on a durable log, with Spark as its data pipeline."""

__version__ = "0.1.0"

# What nsqd, nsqlookupd and nsqadmin say of themselves: clients decide by it which features to expect.
NSQ_VERSION = "1.3.0"
