"""A policy as text: segments, then a table of relevance by surface and dwell."""

from math import isfinite

from jfi.history_policies.policy import Policy


def describe(policy: Policy) -> str:
    """The policy as lines for a terminal.

    A surface has a column for each bin of dwell, headed by where the bin begins, and one for unknown dwell. A segment
    has the log-odds of a conversion there less its own overall, in parentheses where such events are removed.
    """
    lines = [f"segment{'':16}users        events  conversions  removed  longest history"]
    for one in policy.segment_reports:
        rate = one.conversions / max(1, one.events)
        cap = "any" if one.cap is None else f"{one.cap:,}"
        boosted = ", boosted" if one.boosted else ""
        lines.append(f"{one.name:18}{one.users:10,}{one.events:14,}{rate:13.2%}{one.removed:9.1%}  {cap}{boosted}")
    if policy.agreement is not None:
        tried = ", ".join(f"{k}: {_number(value, '.2f')}" for k, value in policy.silhouettes.items())
        halves = f"{policy.agreement:.1%} of users ({policy.agreement_by_chance:.1%} by chance)"
        lines.append(f"both halves of the time agree on the segment of {halves}; silhouette by segments: {tried}")
    lines.append(f"the newest {policy.newest} events of a history stay, whatever their cell")
    lines += policy.notes
    for g, surface in enumerate(policy.surfaces):
        heads = ["0", *(_seconds(edge) for edge in policy.edges[g]), "unknown"]
        lines += ["", f"{surface}: seconds from{'':5}" + "".join(f"{head:>9}" for head in heads)]
        width = len(f"{surface}: seconds from{'':5}")
        for report in policy.surface_reports[g :: len(policy.surfaces)]:
            cells = [
                "" if not events else f"{odds:+.2f}" if keep else f"({odds:+.2f})"
                for odds, keep, events in zip(report.log_odds, report.keep, report.events, strict=True)
            ]
            lines.append(f"{report.segment:{width}}" + "".join(f"{cell:>9}" for cell in cells))
            share, of_sessions = (
                f"{100 * information / entropy:.2f} %" if entropy else "nothing"
                for information, entropy in (
                    (report.information, report.entropy),
                    (report.session_information, report.session_entropy),
                )
            )
            model = "no model"
            if report.slope is not None:
                model = f"log-odds = {report.intercept:.2f} {report.slope:+.2f} log(1 + dwell)"
            lines.append(f"{'':{width}}  dwell tells {share} of a conversion, a session's dwell {of_sessions}; {model}")
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _number(value: float | None, form: str) -> str:
    return "none" if value is None or not isfinite(value) else f"{value:{form}}"
