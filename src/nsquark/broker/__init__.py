"""nsqd. The path of a message: session (PUB) -> topic -> log -> turn -> channel -> session -> session (FIN) -> channel."""
