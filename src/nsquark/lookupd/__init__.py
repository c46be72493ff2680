"""Is nsqlookupd, which knows who has which topic."""
