"""Lets Spark's Python workers import the installed pyspark.

Spark puts a zip before it, which has no bytecode: each worker, of which a query starts several, would compile all that
it imports, and take a second longer.
"""

import sys

sys.path[:] = [path for path in sys.path if not path.endswith("pyspark.zip")]
