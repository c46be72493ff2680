"""Tells of nsqd itself: /stats, Prometheus, statsd, latencies, process and memory."""
