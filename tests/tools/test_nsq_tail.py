from collections.abc import Callable

from tools.rig import Cluster, Tool, numbered_lines


def test_prints_what_both_nsqds_have(cluster: Cluster, topic: str, start: Callable[..., Tool]) -> None:
    lines = numbered_lines(10_000)
    cluster.create(topic, "ch")
    cluster.publish(topic, lines)
    tail = start("nsq_tail", f"--topic={topic}", "--channel=ch", "-n=10000", cluster.lookupd_flag)
    assert tail.wait() == 0, tail.log
    assert sorted(tail.lines) == sorted(lines)
    cluster.wait_until_finished(topic, "ch")
