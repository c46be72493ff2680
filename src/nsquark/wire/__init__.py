"""Turns bytes into values and back, without I/O: what is on NSQ's wire, for servers and clients alike."""
