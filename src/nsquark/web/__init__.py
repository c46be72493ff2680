"""Serves and asks by HTTP, for the daemons."""
