"""This is nsqd. The path of a message: publishing (PUB), topic, log, turn, channel, session; then ledger (FIN),
channel.
"""
