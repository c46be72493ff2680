"""This is `nsquark doctor`: it tells what is wrong with this machine or these daemons, and what to do about it."""

import argparse
import asyncio
from pathlib import Path

from nsquark.base.errors import UserError
from nsquark.base.secrets import read_secret
from nsquark.tool import check_daemons, check_machine
from nsquark.tool.findings import Verdict, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nsqd", action="append", default=[], metavar="HOST:4151", help="HTTP address of an nsqd to check, repeatable"
    )
    parser.add_argument(
        "--lookupd",
        action="append",
        default=[],
        metavar="HOST:4161",
        help="HTTP address of an nsqlookupd to check with all its nsqds, repeatable",
    )
    parser.add_argument(
        "--auth-secret-file", metavar="FILE", help="file with the secret to show to nsqds with --http-auth=required"
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(), metavar="D", help="where nsqd's data is or will be (default: here)"
    )
    parser.epilog = "Exit code: 1 if something is broken, 0 otherwise, with or without warnings."


def run(args: argparse.Namespace) -> int:
    nsqds = [_address(text, check_daemons.NSQD_HTTP_PORT) for text in args.nsqd]
    lookupds = [_address(text, check_daemons.LOOKUPD_HTTP_PORT) for text in args.lookupd]
    secret = _secret(args.auth_secret_file)
    of_machine = check_machine.findings(args.dir)
    show(of_machine)
    of_daemons = asyncio.run(check_daemons.findings(nsqds, lookupds, secret))
    show(of_daemons)
    findings = of_machine + of_daemons
    counts = {verdict: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict}
    warnings = f"{counts[Verdict.WARNING]} warning{'' if counts[Verdict.WARNING] == 1 else 's'}"
    print(f"{counts[Verdict.BROKEN]} broken, {warnings}, {counts[Verdict.OK]} ok")
    return 1 if counts[Verdict.BROKEN] else 0


def _secret(path: str | None) -> str:
    try:
        return read_secret(path) if path else ""
    except ValueError as error:
        raise UserError(f"--auth-secret-file {error}") from None


def _address(text: str, default_port: int) -> str:
    host, colon, port = text.rpartition(":")
    if "/" in text:
        raise UserError(f"{text!r} must be host:port, without http:// or a path")
    if not colon:
        return f"{text}:{default_port}"
    if not port.isdigit() or not host:
        raise UserError(f"{text!r} must be host:port, such as 127.0.0.1:{default_port}")
    return text
