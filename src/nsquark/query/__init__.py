"""Reads topics without a JVM, for small questions: into Arrow tables, by SQL, or to infer the schema of their JSON."""
