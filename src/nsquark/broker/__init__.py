"""This is nsqd. A message goes from a session (PUB) through log, turn, topic and channel to a consumer, whose FIN the
ledger carries out.
"""
