"""This is `nsquark tap`: it keeps what NSQ's nsqds deliver to a channel in logs that Spark reads. NSQ stays as it
is.
"""
