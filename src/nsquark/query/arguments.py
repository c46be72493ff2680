"""Declares the flags of the commands that read topics without Spark, and finds the topics that they can read."""

import argparse
from dataclasses import replace

from nsquark.base.errors import UserError
from nsquark.query.arrow import source_options
from nsquark.spark.endpoint import Unreachable
from nsquark.spark.nsq_arguments import add_where_arguments, settings_of
from nsquark.spark.nsqd_http import Finder
from nsquark.spark.options import SourceOptions
from nsquark.wire.names import is_ephemeral

NSQD_DEFAULT = "127.0.0.1:4151"


def add_nsq_arguments(parser: argparse.ArgumentParser) -> None:
    add_where_arguments(
        parser,
        nsqd_help=f"an nsqd (repeat; default: {NSQD_DEFAULT})",
        option_help="a further option of the Spark source, like tlsRootCaFile=ca.pem or failOnDataLoss=false (repeat)",
    )


def all_topics(args: argparse.Namespace) -> SourceOptions:
    """Makes the options to read all topics of the NSQ that the flags name."""
    if args.nsqd_http_address and args.lookupd_http_address:
        raise UserError("say where NSQ is: either --nsqd-http-address or --lookupd-http-address")
    more = {"topicPattern": ".*", **settings_of(args.option, "--option")}
    if args.auth_secret_file:
        more["authSecretFile"] = args.auth_secret_file
    nsqds = args.nsqd_http_address or ([] if args.lookupd_http_address else [NSQD_DEFAULT])
    return source_options((), nsqds, args.lookupd_http_address, more)


def only(options: SourceOptions, topic: str) -> SourceOptions:
    return replace(options, topics=(topic,), topic_pattern=None)


def topic_names(options: SourceOptions) -> list[str]:
    """Returns the names of all topics on the nsqds, without ephemeral ones, which cannot be read by range."""
    finder = Finder(options)
    nsqds = finder.find()
    if finder.unreachable:
        raise Unreachable(f"{'; '.join(finder.unreachable.values())}: start it, or leave its address out")
    names: set[str] = set()
    for nsqd in nsqds.values():
        try:
            names |= {name for name in nsqd.topic_names() if not is_ephemeral(name)}
        finally:
            nsqd.close()
    return sorted(names)
