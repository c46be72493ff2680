"""Reading: offsets, plans, and what a task streams from nsqd."""
