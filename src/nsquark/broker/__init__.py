"""nsqd. The path of a message: publishing (PUB), topic, log, turn, channel, session; and back: ledger (FIN), channel."""
