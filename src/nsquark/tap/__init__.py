"""`nsquark tap`: what NSQ's nsqds deliver to a channel, kept in logs that Spark reads. NSQ stays as it is."""
