"""Serves an artifact of examples/export.py over HTTP, or answers JSON lines.

python examples/serve.py --artifact ARTIFACT --port 8000
python examples/serve.py --artifact ARTIFACT --jsonl < requests.jsonl > answers.jsonl
"""

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from jfi.serving.artifact import ArtifactError
from jfi.serving.json_lines import answer_lines
from jfi.serving.scorer import Scorer


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True, help="folder that examples/export.py wrote")
    parser.add_argument("--jsonl", action="store_true", help="requests from stdin, answers to stdout, one a line")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    parser.add_argument("--tables-device", choices=["cpu", "cuda"], help="where the tables lie (default: as the model)")
    parser.add_argument("--max-candidates", type=positive, help="of a request (default: the artifact's)")
    parser.add_argument("--max-history", type=positive, help="newest events that are kept (default: the artifact's)")
    parser.add_argument("--max-body-mb", type=positive, default=8, help="of a request (default: 8)")
    parser.add_argument("--queue", type=positive, default=64, help="requests at a time, more get a 503 (default: 64)")
    parser.add_argument("--max-batch", type=positive, default=4096, help="candidates of a batch (default: 4096)")
    parser.add_argument("--max-wait-ms", type=float, default=0.0, help="put a batch off for more to come (default: 0)")
    return parser.parse_args()


async def answer_stdin(scorer: Scorer, how: dict) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    # Not sys.stdin: Python would wait at its exit for a thread that reads from it.
    lines = open(sys.stdin.fileno(), "rb", closefd=False)  # noqa: SIM115
    await answer_lines(scorer, lines, sys.stdout.buffer, stop=stop, **how)


def main() -> int:
    options = arguments()
    # TorchRec, which int8 tables need, asks torch.fx in a way that torch 2.13 logs a warning about.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    try:
        scorer = Scorer(options.artifact, options.tables_device, options.max_candidates, options.max_history)
    except ArtifactError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    how = {
        "max_batch": options.max_batch,
        "max_wait": options.max_wait_ms / 1e3,
        "queue": options.queue,
        "max_body": options.max_body_mb * 2**20,
    }
    if options.jsonl:
        asyncio.run(answer_stdin(scorer, how))
        return 0
    try:
        from aiohttp import web

        from jfi.serving.server import make_app
    except ModuleNotFoundError as error:
        print(f"error: HTTP needs {error.name}: pip install -e '.[serve]'; --jsonl does without it", file=sys.stderr)
        return 2
    try:
        # On SIGTERM or Ctrl-C it accepts no more and ends when what was accepted is answered.
        web.run_app(make_app(scorer, **how), host=options.host, port=options.port, handle_signals=True)
    except (OSError, OverflowError) as error:  # OverflowError: no port is that high
        reason = getattr(error, "strerror", None) or error
        print(f"error: {options.host}:{options.port}: {reason}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
