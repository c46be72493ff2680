"""Answers small questions without a JVM: topics as Arrow tables, as tables of SQL, and what their JSON looks like."""
