"""Ready jobs on the connector, each a command of `nsquark`: pipeline, archive, replay, report."""
