"""This is the program nsquark, which runs daemons for trying out, checks machines and clusters, and runs Spark jobs."""
