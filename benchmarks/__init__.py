"""Measures how fast an nsqd and an nsqlookupd are, beside any other: `make bench`, or `python -m benchmarks --help`.

Read in this order: `scenarios` (what is measured), `publishers` and `consumers` (the load, in processes of
their own), `worker` (how they start together), `broker` (the nsqd under load), `upgrades` (TLS and compression),
`report` (the tables), `lookupd` (nsqlookupd with a whole cluster registered), `spark` (Spark reading and writing).
"""
