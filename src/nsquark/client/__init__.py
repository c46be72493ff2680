"""Is the client library: producers, the pool of producers, consumers."""
