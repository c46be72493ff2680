"""This is the program nsquark: daemons for trying out, checks of machines and clusters, and the jobs on Spark."""
