"""How fast an nsqd is, beside any other: `make bench`, or `python -m benchmarks --help`.

Read in this order: `scenarios` (what is measured), `publishers` and `consumers` (the load, in processes of
their own), `worker` (how they start together), `broker` (the nsqd under load), `report` (the tables).
"""
