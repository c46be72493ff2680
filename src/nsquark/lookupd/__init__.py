"""This is nsqlookupd, which knows who has which topic."""
