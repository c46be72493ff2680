"""nsqlookupd: who has which topic."""
