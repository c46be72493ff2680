"""What nsqd tells of itself: /stats, Prometheus, statsd, latencies, process and memory."""
