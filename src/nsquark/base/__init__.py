"""Has what every part stands on: options, logs, addresses, durations, metrics. It imports no other part."""
