"""Makes what all of Spark's benchmarks begin with: a session that knows the sources in memory, and messages in a
topic.
"""

import http.client
import os
import struct
from typing import TYPE_CHECKING

from benchmarks.spark_memory import body, dropping_sink, memory_source
from benchmarks.wire import LoadError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MPUB_MESSAGES = 2000


def make_session() -> "SparkSession":
    from pyspark.sql import SparkSession

    from nsquark.spark.java import spark_environment

    os.environ.update(spark_environment())
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.sql.shuffle.partitions", "2")
    session: SparkSession = builder.config("spark.driver.memory", "2g").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    session.dataSource.register(memory_source())
    session.dataSource.register(dropping_sink())
    return session


class Filler:
    """Publishes numbered events over one connection."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address)

    def publish(self, topic: str, messages: int) -> None:
        for low in range(0, messages, MPUB_MESSAGES):
            bodies = [body(number) for number in range(low, min(low + MPUB_MESSAGES, messages))]
            data = struct.pack(">i", len(bodies)) + b"".join(struct.pack(">i", len(one)) + one for one in bodies)
            self._connection.request("POST", f"/mpub?topic={topic}&binary=true", data)
            answer = self._connection.getresponse()
            said = answer.read()
            if answer.status != 200:
                raise LoadError(f"nsqd refused /mpub: {said.decode(errors='replace')}")

    def close(self) -> None:
        self._connection.close()


def fill(address: str, topic: str, messages: int) -> None:
    filler = Filler(address)
    filler.publish(topic, messages)
    filler.close()
