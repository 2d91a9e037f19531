"""Runs `jfi policy`."""

from argparse import Namespace

from jfi.data.prepared.event_logs import training_log
from jfi.history_policies import fit
from jfi.history_policies.describe import describe, draw_policy
from jfi.training import Config, ConfigError
from jfi.training.run.scores import check_place, check_results


def main(config: Config, options: Namespace) -> None:
    """Fits a policy, prints it and draws it."""
    if options.out.suffix != ".json":
        raise ConfigError(f"--out {options.out}: the name must end in .json")
    picture = options.out.with_suffix(".png")
    check_place("--out", options.out)
    check_place("--out", picture)
    check_results({"--out": options.out, "--out's picture": picture}, {"data.interactions": config.data.interactions})
    events, conversion = training_log(config.data, options.conversion)
    if len({*conversion.tolist()}) < 2:
        every = "every event is" if conversion.any() else "no event is"
        raise ConfigError(f"--conversion '{options.conversion}': {every} one")
    try:
        policy = fit(
            events,
            conversion,
            num_segments=options.segments,
            remove=options.remove,
            boost=options.boost,
            caps=options.caps,
            newest=options.newest,
            seed=options.seed,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    print(describe(policy))
    draw_policy(policy, options.out.stem, picture)
    policy.save(options.out)
    print(f"\nwrote {options.out} and {picture}")
