"""The HTTP server and client of the daemons."""
