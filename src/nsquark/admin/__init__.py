"""This is nsqadmin, which shows a cluster live in the browser and acts on it."""
