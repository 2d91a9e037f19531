"""What a sharded step sends on 8, 64 and 1,024 GPUs, and what that leaves of the speed: reckoned, not measured.

    python -m benchmarks.scaling_paper --config configs/multi_gpu.yaml --events 200 --rows 20000000

Bytes and messages are those of `benchmarks.traffic`; the speeds of links and the time of everything else are arguments.
Ids travel while the batch before computes and take no time here; nothing else overlaps. Left out: the all-reduce of
dense parameters, the rows of targets and users, and waiting for the slowest rank.
"""

import argparse
from dataclasses import dataclass, replace

from benchmarks.traffic import SequenceShape, Traffic, by_attention, by_rows
from jfi.training.config_parser import parse_config
from jfi.utils.exit_codes import run_command

HOST = 8  # GPUs


@dataclass(frozen=True)
class Links:
    """What the table assumes.

    Args:
        nvlink: GB/s of a GPU to the others of its host.
        network: GB/s of a GPU to other hosts.
        samples: of a GPU's batch.
        other_ms: milliseconds of a step without any exchange.
        fixed_ms: milliseconds that exchanges add to a step whatever they send: kernels, barriers, ids on their way.
        rows: of the table of items.
        sync_every: steps between two averages of groups.
    """

    nvlink: float
    network: float
    samples: int
    other_ms: float
    fixed_ms: float
    rows: int
    sync_every: int


@dataclass(frozen=True)
class Line:
    """Bytes of a GPU a step: within its host, to other hosts; and messages."""

    within: float
    beyond: float
    messages: int

    def efficiency(self, links: Links) -> float:
        """The time of everything else, of that and the exchange."""
        ms = (self.within / links.nvlink + self.beyond / links.network) / 1e6 + links.fixed_ms
        return links.other_ms / (links.other_ms + ms)


def lines(shape: SequenceShape, gpus: int, links: Links) -> dict[str, Line]:
    """By way to exchange histories what a GPU sends."""
    hosts, others = max(1, gpus // HOST), gpus - 1
    near = min(HOST, gpus) - 1

    def over_all(sent: Traffic) -> Line:
        moved = sent.vectors * links.samples
        return Line(moved * near / others, moved * (others - near) / others, sent.messages * others)

    group = min(HOST, gpus)
    inside = by_attention(shape, group)
    average = 2 * 4 * links.rows * shape.width / group * (hosts - 1) / hosts / links.sync_every
    # Tables on hosts of their own: a sample's queries go to all GPUs of one host, its own for one of `hosts` tables.
    every = inside.vectors * links.samples
    spread = Line(every / hosts, every * group / near * (hosts - 1) / hosts, inside.messages * group)
    return {
        "rows, float32": over_all(by_rows(shape, gpus)),
        "rows, bfloat16": over_all(by_rows(shape, gpus, itemsize=2)),
        "attention, row_wise": over_all(by_attention(shape, gpus)),
        "attention, table_row_wise": spread,
        "attention, group_size 8": Line(every, average, inside.messages * near),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="of a run, for its widths and heads")
    parser.add_argument("--events", type=float, required=True, help="mean length of a history")
    parser.add_argument("--width", type=int, help="in the place of model.embedding_dim")
    parser.add_argument("--samples", type=int, default=4096, help="of a GPU's batch")
    parser.add_argument("--rows", type=int, default=20_000_000, help="of the table of items")
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 8, 64, 1024])
    parser.add_argument("--nvlink", type=float, default=200, help="GB/s of a GPU within its host")
    parser.add_argument("--network", type=float, default=50, help="GB/s of a GPU to other hosts")
    parser.add_argument("--other-ms", type=float, default=3.1, help="milliseconds of a step without any exchange")
    parser.add_argument("--fixed-ms", type=float, default=0, help="that exchanges add whatever they send")
    parser.add_argument("--sync-every", type=int, default=1000, help="steps between two averages of groups")
    options = parser.parse_args()
    model = parse_config(["--config", options.config])[0].model
    shape = SequenceShape(options.events, options.width or model.embedding_dim, model.num_heads)
    shape = replace(shape, columns=1 + len([bias for bias in model.biases() if bias is not None]))
    work = options.other_ms, options.fixed_ms
    links = Links(options.nvlink, options.network, options.samples, *work, options.rows, options.sync_every)
    print(f"{options.events:g} events of {shape.width}, {shape.heads} heads, {links.samples:,} samples a GPU, ", end="")
    print(f"{links.nvlink:g} GB/s in a host, {links.network:g} beyond, {links.other_ms:g} ms of other work, ", end="")
    print(f"{links.fixed_ms:g} that exchanges add; attention sends bfloat16\n")
    print("| GPUs | exchange | bytes a sample in the host | beyond | messages a step | efficiency |")
    print("|---|---|---|---|---|---|")
    for gpus in options.gpus:
        for way, line in lines(shape, gpus, links).items():
            sent = [f"{part / links.samples:,.0f}" for part in (line.within, line.beyond)]
            print(f"| {gpus:,} | {way} | {' | '.join(sent)} | {line.messages:,} | {line.efficiency(links):.2f} |")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
