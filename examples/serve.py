"""Serves an artifact of examples/export.py over HTTP, or answers JSON lines.

python examples/serve.py --artifact ARTIFACT --port 8000
python examples/serve.py --artifact ARTIFACT --jsonl < requests.jsonl > answers.jsonl
"""

from jfi.exit_codes import begin_command

if __name__ == "__main__":  # before the other imports
    begin_command()

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from jfi.exit_codes import EXIT_CODES, run_command
from jfi.options import OptionParser, at_least_one, at_least_zero
from jfi.serving.artifact import ArtifactError
from jfi.serving.json_lines import answer_lines
from jfi.serving.scorer import Scorer


def arguments() -> argparse.Namespace:
    parser = OptionParser(description=__doc__, epilog=EXIT_CODES)
    parser.add_argument("--artifact", type=Path, required=True, help="folder written by examples/export.py")
    parser.add_argument(
        "--jsonl", action="store_true", help="read requests from stdin and write answers to stdout, one per line"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for a free one (default: 8000)")
    parser.add_argument(
        "--tables-device", choices=["cpu", "cuda"], help="device of the embedding tables (default: the model's)"
    )
    parser.add_argument("--max-candidates", type=at_least_one, help="limit per request (default: the artifact's)")
    parser.add_argument("--max-history", type=at_least_one, help="newest events to keep (default: the artifact's)")
    parser.add_argument("--max-body-mb", type=at_least_one, default=8, help="limit of a request's body (default: 8)")
    parser.add_argument(
        "--queue", type=at_least_one, default=64, help="concurrent requests, more get a 503 (default: 64)"
    )
    parser.add_argument("--max-batch", type=at_least_one, default=4096, help="candidates per batch (default: 4096)")
    parser.add_argument(
        "--max-wait-ms", type=at_least_zero, default=0.0, help="time that a batch waits for more requests (default: 0)"
    )
    return parser.parse_args()


async def answer_stdin(scorer: Scorer, limits: dict) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    # Not sys.stdin: at exit Python would wait for the thread that reads from it.
    lines = open(sys.stdin.fileno(), "rb", closefd=False)  # noqa: SIM115
    await answer_lines(scorer, lines, sys.stdout.buffer, stop=stop, **limits)


def main() -> int:
    options = arguments()
    try:
        scorer = Scorer(options.artifact, options.tables_device, options.max_candidates, options.max_history)
    except ArtifactError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    limits = {
        "max_batch": options.max_batch,
        "max_wait": options.max_wait_ms / 1e3,
        "queue": options.queue,
        "max_body": options.max_body_mb * 2**20,
    }
    if options.jsonl:
        asyncio.run(answer_stdin(scorer, limits))
        return 0
    try:
        from aiohttp import web

        from jfi.serving.server import make_app
    except ModuleNotFoundError as error:
        print(f"error: HTTP needs {error.name}: pip install -e '.[serve]', or use --jsonl", file=sys.stderr)
        return 2
    try:
        # On SIGTERM or Ctrl-C it stops accepting requests, answers those that it has accepted, and exits.
        web.run_app(make_app(scorer, **limits), host=options.host, port=options.port, handle_signals=True)
    except (OSError, OverflowError) as error:  # OverflowError: the port is out of range
        reason = getattr(error, "strerror", None) or error
        print(f"error: {options.host}:{options.port}: {reason}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, (ArtifactError,)))
