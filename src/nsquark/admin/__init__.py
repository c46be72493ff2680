"""This is nsqadmin: the cluster seen live, and acted on."""
