"""Turns what is on NSQ's wire into values and back, without I/O, for servers and clients alike."""
