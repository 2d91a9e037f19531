"""Which ids of a batch go where: read from the features and a TorchRec sharding plan, once."""

from typing import NamedTuple

from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from jfi.modules import SequenceFeatureConfig
from jfi.modules.sequence_configs import group_features
from jfi.sharded.ownership import Owners, all_owners
from jfi.sharded.routes import Route


class RoutingPlan(NamedTuple):
    """What a sharded collection does with each of its embeddings.

    Attributes:
        owners: by table.
        routes: sequences of ids that go to owners.
        embeddings: by route, of each of its sequences the name of the embedding.
        replicated: the tables that every rank reads whole.
        local: embeddings of replicated tables: name, key of the ids, and table.
    """

    owners: dict[str, Owners]
    routes: list[Route]
    embeddings: dict[Route, tuple[str, ...]]
    replicated: list[str]
    local: list[tuple[str, str, str]]


def make_routes(
    configs: list[EmbeddingConfig] | list[EmbeddingBagConfig],
    plan: dict[str, ParameterSharding],
    features: list[SequenceFeatureConfig],
    replicate_below: int,
    first_rank: int = 0,
    dedup: bool = False,
) -> RoutingPlan:
    """Decides it.

    Args:
        configs: of the collection's tables.
        plan: by table its sharding, by rows.
        features: sequence features whose histories the collection looks up.
        replicate_below: tables of at most so many rows are read whole by every rank.
        first_rank: of all processes, the first one of the group that the plan is for.
        dedup: whether a row that is fetched travels once to each rank.

    Raises:
        ValueError: a feature that attention cannot go to.
    """
    owners = all_owners({config.name: config.num_embeddings for config in configs}, plan, first_rank)
    replicated = [config.name for config in configs if config.num_embeddings <= replicate_below]
    #: By embedding the key of its ids and its table.
    sources = {
        embedding: (key, config.name)
        for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True)
        for embedding, key in zip(names, config.feature_names, strict=True)
    }
    routes, embeddings, histories = [], {}, set()
    for group in group_features(features, configs[0].embedding_dim):
        alike: dict[tuple, list[int]] = {}
        for place, feature in enumerate(group.features):
            spread = spread_field(feature, {e: t for e, (_, t) in sources.items()}, replicated)
            if spread is not None:
                tables = tuple([sources[embedding][1] for embedding in feature.sequence_keys])
                alike.setdefault((spread, tables), []).append(place)
        for (spread, tables), places in alike.items():
            own = [group.features[place] for place in places]
            names = tuple([feature.sequence_keys[spread] for feature in own])
            others = [[e for k, e in enumerate(feature.sequence_keys) if k != spread] for feature in own]
            route = Route(
                tuple([sources[name][0] for name in names]),
                (tables[spread],) * len(own),
                (owners[tables[spread]],) * len(own),
                tuple(own),
                tuple(places),
                tuple([tuple([sources[e][0] for e in fields]) for fields in others]),
                tuple([table for k, table in enumerate(tables) if k != spread]),
                tuple([owners[table].num_rows for k, table in enumerate(tables) if k != spread]),
            )
            routes.append(route)
            embeddings[route] = names
            histories.update(names)
    fetched = [e for e, (_, table) in sources.items() if table not in replicated and e not in histories]
    if fetched:
        keys, tables = zip(*[sources[e] for e in fetched], strict=True)
        route = Route(keys, tables, tuple([owners[table] for table in tables]), dedup=dedup)
        routes.append(route)
        embeddings[route] = tuple(fetched)
    local = [(embedding, key, table) for embedding, (key, table) in sources.items() if table in replicated]
    return RoutingPlan(owners, routes, embeddings, replicated, local)


def spread_field(feature: SequenceFeatureConfig, tables: dict[str, str], replicated: list[str]) -> int | None:
    """Which of a feature's sequence keys lies in a table that is not replicated; None if none does.

    Args:
        feature: a sequence feature.
        tables: by sequence key its table.
        replicated: tables that every rank reads whole.

    Raises:
        ValueError: several do, or the rows of several fields are concatenated.
    """
    spread = [place for place, key in enumerate(feature.sequence_keys) if tables[key] not in replicated]
    if not spread:
        return None
    if len(spread) > 1:
        own = sorted({tables[feature.sequence_keys[place]] for place in spread})
        raise ValueError(
            f"attention goes to the rows of one table, but the events of feature '{feature.name}' lie in {own}: raise "
            "replicate_below above the rows of all but one, or exchange rows"
        )
    if feature.combine == "concat" and len(feature.sequence_keys) > 1:
        raise ValueError(
            f"attention goes to rows that are summed, but feature '{feature.name}' has combine='concat': use 'sum', or "
            "exchange rows"
        )
    return spread[0]
