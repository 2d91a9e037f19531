"""Tables of benchmarks/serving_state.py and benchmarks/user_state.py for docs/serving.md."""

from benchmarks import table


def _ms(value: float) -> str:
    return f"{value / 1e3:,.0f}" if value >= 1e5 else f"{value / 1e3:.3g}"


def _size(count: float) -> str:
    return f"{count / 1e3:,.1f} kB" if count < 1e6 else f"{count / 1e6:,.2f} MB"


def _end(found: dict) -> str:
    where = found["environment"]
    return f"{where['device']}, commit {where['commit']}, {where['date'][:10]}."


def serving_state(found: dict) -> str:
    """Latency, requests a second and bytes on the wire by history and way to send it."""
    rows = [row for row in found["rows"] if "history" in row]
    most = max(row["clients"] for row in rows)
    heading = [
        "events",
        "sent as",
        "p50 \\| p99, ms, 1 client",
        f"requests/s, 1 \\| {most} clients",
        "over by rows",
        "wire",
    ]
    lines = [heading]
    for length in dict.fromkeys(row["history"] for row in rows):
        first = None
        for way in dict.fromkeys(row["way"] for row in rows):
            own = {row["clients"]: row for row in rows if (row["history"], row["way"]) == (length, way)}
            if not {1, most} <= own.keys():
                continue
            rates = [own[clients]["requests_per_second"] for clients in (1, most)]
            first = first or rates
            gains = " \\| ".join(f"{rate / base:.1f}x" for rate, base in zip(rates, first, strict=True))
            spent = f"{_ms(own[1]['p50_us'])} \\| {_ms(own[1]['p99_us'])}"
            speed = " \\| ".join(f"{rate:,.0f}" for rate in rates)
            lines.append([f"{length:,}", way, spent, speed, gains, _size(own[1]["wire_bytes"])])
    return f"{table.as_markdown(lines)}\n\n{_end(found)}"


def state_parts(found: dict) -> str:
    """Medians of the parts of a request with state, in one process, and of writes."""
    parts = [row for row in found["rows"] if row["case"].startswith("history") and "history" not in row]
    columns = list(dict.fromkeys((row["way"], row["case"].split(",")[0]) for row in parts))
    lines = [["p50, ms", *(f"{way}, {length}" for way, length in columns)]]
    for name in dict.fromkeys(row["measured"] for row in parts):
        own = {(row["way"], row["case"].split(",")[0]): row for row in parts if row["measured"] == name}
        lines.append([name, *(_ms(own[one]["p50_us"]) if one in own else "" for one in columns)])
    return f"{table.as_markdown(lines)}\n\n{_end(found)}"


def state_writes(found: dict) -> str:
    """Latencies of events that are posted, and of one that is posted and read by the next request."""
    rows = [row for row in found["rows"] if row["case"].startswith("freshness") or row["measured"].startswith("POST")]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines = [["p50 \\| p99, ms", *ways]]
    for name in dict.fromkeys(row["measured"] for row in rows):
        own = {row["way"]: row for row in rows if row["measured"] == name}
        cells = (f"{_ms(own[way]['p50_us'])} \\| {_ms(own[way]['p99_us'])}" if way in own else "" for way in ways)
        lines.append([name, *cells])
    return f"{table.as_markdown(lines)}\n\n{_end(found)}"


def user_state(found: dict) -> str:
    """Bytes of a state by store and size, and the time to fill it."""
    lines = [["users", "events each", "store", "seconds", "bytes a user", "bytes an event", "in all", "peak RSS"]]
    for row in found["rows"]:
        of_user, of_event = row["bytes"] / row["users"], row["bytes"] / row["users"] / row["events"]
        sizes = [f"{of_user:,.0f}", f"{of_event:.1f}", f"{row['bytes'] / 2**30:.2f} GiB"]
        peak = f"{row['peak_rss'] / 2**30:.2f} GiB"
        seconds = f"{row['seconds']:,.0f}"
        lines.append([f"{row['users']:,}", f"{row['events']:,}", row["store"], seconds, *sizes, peak])
    return f"{table.as_markdown(lines)}\n\n{_end(found)}"
