"""This is `nsquark tap`: it stores what NSQ's own nsqds deliver to a channel in logs that Spark reads."""
