"""Holds what every part stands on: options, logs, addresses, durations, metrics. It imports nothing of ours."""
