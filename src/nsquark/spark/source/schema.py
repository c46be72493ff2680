"""Names the columns of `format("nsq")` with Spark's types, and knows which of them a user's schema may ask for."""

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from nsquark.spark.options import OptionError, SourceOptions
from nsquark.spark.source.range_rows import arrow_schema


def spark_schema(options: SourceOptions) -> StructType:
    """Returns the columns that can be read with these options, as Spark's types."""
    return from_arrow_schema(arrow_schema(options))


def check_schema(schema: StructType, options: SourceOptions) -> None:
    """Checks a schema given by the user, which may leave columns out and have them in any order."""
    known = {field.name: field.dataType for field in spark_schema(options).fields}
    described = ", ".join(f"{name} {kind.simpleString()}" for name, kind in known.items())
    for field in schema.fields:
        kind = known.get(field.name)
        if kind is None and field.name == "headers":
            raise OptionError("the column headers is there with the option headers=true, which opens envelopes")
        if kind is None:
            raise OptionError(f"format nsq has no column {field.name!r}: take any of {described}")
        if kind != field.dataType:
            raise OptionError(
                f"column {field.name} is a {kind.simpleString()}, not a {field.dataType.simpleString()}: "
                f"read it as it is and cast it in a select ({described})"
            )
    if not schema.fields:
        raise OptionError(f"the schema has no columns: take any of {described}")


def as_arrow(schema: StructType) -> pa.Schema:
    """Returns a schema's columns as Arrow's types, for the reader."""
    return to_arrow_schema(schema, timezone="UTC")
