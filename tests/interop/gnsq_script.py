"""Runs for test_gnsq.py in a process of its own: gevent patches the standard library under everyone."""

from gevent import monkey

monkey.patch_all()

import json  # noqa: E402
import sys  # noqa: E402

import gevent  # noqa: E402
import gnsq  # noqa: E402

STEP_TIMEOUT_S = 30


def publish(address: str, topic: str, options: dict[str, object]) -> None:
    producer = gnsq.Producer([address], **options)
    producer.start()
    assert producer.publish(topic, b"single") == b"OK"
    assert producer.multipublish(topic, [b"multi 1", b"multi 2", b"bad"]) == b"OK"
    assert producer.publish(topic, b"deferred", defer=200) == b"OK"
    try:
        producer.publish("bad$topic", b"x")
    except Exception as error:
        refused = type(error).__name__
    else:
        refused = "nothing"
    producer.close()
    producer.join()
    assert refused != "nothing", "a bad topic was accepted"


def consume(address: str, topic: str, options: dict[str, object], wanted: int) -> list[tuple[str, int]]:
    consumer = gnsq.Consumer(topic, "ch", [address], max_in_flight=10, **options)
    seen: list[tuple[str, int]] = []

    def handler(consumer: gnsq.Consumer, message: gnsq.Message) -> None:
        seen.append((message.body.decode(), message.attempts))
        if message.body == b"bad" and message.attempts < 3:
            raise gnsq.errors.NSQRequeueMessage

    consumer.on_message.connect(handler)
    consumer.start(block=False)
    with gevent.Timeout(STEP_TIMEOUT_S):
        while len(seen) < wanted:
            gevent.sleep(0.01)
        gevent.sleep(0.2)
    consumer.close()
    consumer.join()
    return seen


def main() -> None:
    address, topic, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    secret: dict[str, object] = {}
    if "auth_secret" in options:
        secret["auth_secret"] = options["auth_secret"] = options["auth_secret"].encode()
    publish(address, topic, secret)
    seen = consume(address, topic, {**options, "requeue_delay": 0, "max_backoff_duration": 0}, 7)
    print(json.dumps(sorted(seen)))


if __name__ == "__main__":
    main()
