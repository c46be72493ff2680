"""Shows the whole platform at work, on one machine: `make demo`."""
