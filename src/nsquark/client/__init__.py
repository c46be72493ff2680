"""This is the client library: producers, the pool of producers, consumers."""
