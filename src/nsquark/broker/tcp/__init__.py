"""Speaks the TCP protocol: sessions and their commands, each found by its word."""
