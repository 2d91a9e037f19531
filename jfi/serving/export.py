"""Writes an artefact: the dense part compiled ahead of time by AOTInductor, the tables and the fields beside it."""

import dataclasses
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch._inductor import aoti_compile_and_package
from torch._inductor.exc import InductorError
from torch.export import Dim

import jfi
from jfi.models import SequenceDLRM
from jfi.modules import PositionBias
from jfi.serving import artefact
from jfi.serving.artefact import ArtefactError
from jfi.serving.fields import Fields, Limits, Request
from jfi.serving.model import ENCODER, POOLING, CandidateAttention, ScoringModel
from jfi.serving.scorer import Inputs, batch_inputs
from jfi.serving.tables import FLOAT, FloatTables, save_tables

_PARTS = ("user", "candidate", "event")
#: Sizes of the example, all distinct and none 1, so that none is taken for another or for a constant.
_EXAMPLE = ((5, 4), (3, 6), (8, 2))  # (events, candidates) of each request
#: Kernels are tuned on the example: on numbers of AOTInductor's own, offsets would be 0 and places out of bounds.
_OPTIONS = {"triton.autotune_at_compile_time": False}


def export(
    path: Path,
    model: SequenceDLRM,
    fields: Fields,
    limits: Limits,
    *,
    device: str = "cpu",
    tables: str = FLOAT,
    impl: str | None = None,
) -> None:
    """Writes the artefact `path`, whole or not at all.

    Args:
        path: a folder that does not exist.
        model: trained.
        fields: of requests, whose keys are those of the model.
        limits: of requests, unless the server is told otherwise.
        device: "cpu", or "cuda" for GPUs like the one here.
        tables: "float32" or "int8".
        impl: of the attention, "triton" or "torch"; None means Triton on a GPU.

    Raises:
        ArtefactError: something of that name exists, there is no such device, or nothing to compile with.
        ValueError: a model that cannot be served.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ArtefactError("device is cuda, and there is no GPU here; export with --device cpu")
    user_keys = [key for one in fields.user for key in one.keys]
    scoring = ScoringModel(model, user_keys, impl or ("triton" if device == "cuda" else "torch")).to(device)
    inputs = inputs_of(scoring, model)
    weights, table_of = tables_of(model, inputs.keys)
    example = batch_inputs(
        [_example_request(fields, inputs, *sizes) for sizes in _EXAMPLE],
        inputs,
        # Its ids are all 0, so that tables too large for the device need not go there.
        FloatTables({name: weight[:1].detach().float().to(device) for name, weight in weights.items()}, table_of),
        torch.device(device),
    )
    with artefact.writing(path) as folder:
        _compile(scoring, example, folder / artefact.MODEL)
        save_tables(folder / artefact.TABLES, tables, weights, table_of)
        artefact.write_json(folder / artefact.VOCABULARIES, fields.vocabularies)
        info = {
            "format": artefact.FORMAT,
            "device": device,
            "padded": scoring.pads,
            "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
            "versions": {"jfi": jfi.__version__, "torch": torch.__version__.split("+")[0]},
            "tables": tables,
            "table_of": table_of,
            "table_sizes": {name: weight.size(0) for name, weight in weights.items()},
            "embedding_dim": scoring.embedding_dim,
            "inputs": dataclasses.asdict(inputs),
            "limits": dataclasses.asdict(limits),
            "fields": {part: list(map(dataclasses.asdict, getattr(fields, part))) for part in _PARTS},
        }
        artefact.write_json(folder / artefact.INFO, info)


def inputs_of(scoring: ScoringModel, model: SequenceDLRM) -> Inputs:
    """What a scoring model reads."""
    arch, biased = model.sequence_arch, {}
    if isinstance(scoring.pooling, CandidateAttention):
        biased[POOLING] = arch.pooling.features[0]
    if scoring.encoder is not None:
        biased[ENCODER] = arch.encoder.features[0]
    return Inputs(
        [] if scoring.feature is None else scoring.feature.sequence_keys,
        scoring.user_keys,
        [key for key in scoring.keys if key not in scoring.user_keys],
        {name: feature.num_buckets for name, feature in biased.items() if isinstance(feature.bias, PositionBias)},
        [name for name, feature in biased.items() if feature.bias_key is not None],
    )


def tables_of(model: SequenceDLRM, keys: list[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights of the tables that these keys read, and the table of each key."""
    weights, table_of = {}, {}
    bags, collection = model.embedding_bag_collection, model.embedding_collection
    modules = [] if bags is None else [(bags.embedding_bag_configs(), bags.embedding_bags)]
    modules += [] if collection is None else [(collection.embedding_configs(), collection.embeddings)]
    for configs, tables in modules:
        for config in configs:
            for key in config.feature_names:
                if key in keys:
                    table_of[key] = config.name
                    weights[config.name] = tables[config.name].weight
    return weights, table_of


def _example_request(fields: Fields, inputs: Inputs, events: int, candidates: int) -> Request:
    sizes = dict.fromkeys(inputs.history, events) | dict.fromkeys(inputs.users, 1)
    sizes |= dict.fromkeys(inputs.candidates, candidates)
    dense = sum(one.kind == "number" for one in fields.user + fields.candidate)
    return Request(
        {key: np.zeros(size, np.int64) for key, size in sizes.items()},
        {},
        np.zeros(events, np.int64),
        np.zeros((candidates, max(1, dense)), np.float32),
        events,
        candidates,
    )


def _compile(scoring: ScoringModel, example: tuple, path: Path) -> None:
    def dynamic(argument: object) -> object:
        if isinstance(argument, dict):
            return {key: dynamic(value) for key, value in argument.items()}
        return {0: Dim.DYNAMIC}

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.export.export(scoring, example, dynamic_shapes=tuple(map(dynamic, example)))
        try:
            aoti_compile_and_package(program, package_path=str(path), inductor_configs=_OPTIONS)
        except InductorError as error:
            if "No working C++ compiler" not in str(error):
                raise
            raise ArtefactError(
                "no C++ compiler found, which AOTInductor needs: install g++, or name one in CXX"
            ) from error
