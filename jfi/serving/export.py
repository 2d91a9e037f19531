"""Writes an artifact: the dense part of a model, compiled by AOTInductor, the embedding tables, and the schema."""

import dataclasses
import errno
import io
import os
import warnings
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch._inductor import aoti_compile_and_package
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.export import Dim, ExportedProgram

from jfi.history_policies.policy import Policy
from jfi.models import SequenceDLRM
from jfi.serving import artifact
from jfi.serving.artifact import ArtifactError
from jfi.serving.history_policy import RequestPolicy
from jfi.serving.model import ScoringModel
from jfi.serving.schema import Inputs, Limits, Schema, Table
from jfi.serving.scorer import batch_inputs, example_request, shapes_of
from jfi.serving.tables import FLOAT, FloatTables, save_tables
from jfi.utils.errors import storage_number
from jfi.utils.files import naming, sha256_of, write_file, write_sums, writing_folder
from jfi.utils.versions import versions

#: Sizes of the example. They are distinct and not 1, so that torch.export does not identify or specialize them.
_EXAMPLE = ((5, 4), (3, 6), (8, 2))  # (events, candidates) of each request
#: Names of the C++ standard library; a package is stored without compression.
_CXX_LIBRARIES = (b"libstdc++.so", b"libc++.so")
_OPTIONS = {
    # Autotuning at compile time would run the kernels on generated inputs, whose offsets and indices are not valid.
    "triton.autotune_at_compile_time": False,
    # Small constants would become literals of the code, which published versions of a model could not replace.
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
}


class Export:
    """A model and what an artifact says of it, before it is compiled; `write` writes the artifact.

    Args:
        model: a trained model.
        schema: of requests; the keys of its fields are those of the model.
        limits: the defaults of the server's limits.
        device: "cpu", or "cuda" for GPUs of the same kind as the one here.
        tables: "float32" or "int8".
        impl: of the attention, "triton" or "torch"; None means "triton" on a GPU.
        policy: which events of a request the model reads, with `schema.policy`; None for all.
        calibration: a and b of each label, 1 and 0 of a regression; None if there are none.
        run: name of the model's run, which the server says, or None.
        trained: versions that the run has recorded, which the server says, or None.
        checkpoint: fingerprint of the run's parameters, which `model` has for good, or None.

    Raises:
        ArtifactError: the device is missing.
        ValueError: a model that cannot be served.

    Example::

        sha256 = Export(model, schema, Limits(1000, 200)).write(Path("artifact"))
    """

    def __init__(
        self,
        model: SequenceDLRM,
        schema: Schema,
        limits: Limits,
        *,
        device: str = "cpu",
        tables: str = FLOAT,
        impl: str | None = None,
        policy: Policy | None = None,
        calibration: list[tuple[float, float]] | None = None,
        run: str | None = None,
        trained: dict[str, str | None] | None = None,
        checkpoint: str | None = None,
    ) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise ArtifactError("device is cuda, but there is no GPU here; export with --device cpu")
        if policy is not None:
            RequestPolicy(policy, schema.policy)  # refuses what it cannot serve
        user_keys = [key for one in schema.user for key in one.keys]
        self._make = partial(ScoringModel, model, user_keys, impl or ("triton" if device == "cuda" else "torch"))
        self.model, self._device, self._schema, self._policy = model, device, schema, policy
        scoring = self.scoring()
        inputs = inputs_of(scoring)
        _check_weights(scoring, policy)
        #: By name the weights of the tables that are served.
        self.weights, self._table_of = tables_of(model, inputs.keys)
        if not self.weights and tables != FLOAT:
            raise ValueError(f"tables must be {FLOAT} for a model without embedding tables, got {tables}")
        keys = {name: [key for key, of in self._table_of.items() if of == name] for name in self.weights}
        self._growing = model.growing_ids
        growing = self.growing_ids()
        self.info = artifact.Info(
            format=artifact.FORMAT,
            versions=versions(),
            exported=datetime.now(UTC).isoformat(timespec="seconds"),
            device=device,
            gpu=torch.cuda.get_device_name() if device == "cuda" else None,
            cpu=artifact.cpu_instructions(),
            padded=scoring.pads,
            quantization=tables,
            tables={name: Table(*weight.shape, keys[name], name in growing) for name, weight in self.weights.items()},
            embedding_dim=scoring.embedding_dim,
            inputs=inputs,
            limits=limits,
            schema=dataclasses.replace(schema, vocabularies={}),
            calibration=calibration,
            run=run,
            trained=trained,
            checkpoint=checkpoint if tables == FLOAT else None,
        )

    def growing_ids(self) -> dict[str, Tensor]:
        """Returns by table that grows the raw id [N] of each row, as they are now."""
        configs = [] if self._growing is None else self._growing.configs
        return {one.name: self._growing.ids(one.name).clone() for one in configs if one.name in self.weights}

    def scoring(self) -> ScoringModel:
        """Returns the dense part with the model's current parameters, on the device to serve on."""
        return self._make().to(self._device)

    def write(self, path: Path, traced: tuple[ExportedProgram, str] | None = None) -> str:
        """Writes the artifact, complete or not at all, with the parameters as they are now; returns its SHA-256.

        Args:
            path: a folder that does not exist.
            traced: what `program()` has returned, with the parameters as they were then; None traces the dense part.

        Raises:
            ArtifactError: there is no C++ compiler.
            FileExistsError: `path` exists.
        """
        with writing_folder(path) as folder:
            program, shapes = traced or self.program()
            write_package(program, folder / artifact.MODEL, {artifact.SHAPES: shapes})
            self.save_tables(folder / artifact.TABLES)
            self.write_data(folder)
            write_sums(folder, {file.name: sha256_of(file) for file in folder.iterdir()})
        return artifact.sha256_of(path)

    def save_tables(self, path: Path) -> None:
        """Writes the tables as they are now."""
        save_tables(path, self.info.quantization, self.weights, self.info.tables, self.growing_ids())

    def write_data(self, folder: Path) -> None:
        """Writes the files of an artifact that no training changes."""
        if self._policy is not None:
            self._policy.save(folder / artifact.POLICY)
        write_file(folder / artifact.VOCABULARIES, msgspec.json.encode(self._schema.vocabularies))
        write_file(folder / artifact.INFO, msgspec.json.encode(self.info))

    def program(self) -> tuple[ExportedProgram, str]:
        """Traces the dense part; returns the program and `shapes_of` its inputs."""
        inputs, device = self.info.inputs, torch.device(self._device)
        # The ids of the example are 0, so one row of each table is enough.
        rows = {name: weight[:1].detach().float().to(device) for name, weight in self.weights.items()}
        requests = [example_request(self._schema, inputs, *sizes) for sizes in _EXAMPLE]
        example = batch_inputs(requests, inputs, FloatTables(rows, self._table_of), device)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            shapes = tuple(map(_dynamic, example))
            return torch.export.export(self.scoring(), example, dynamic_shapes=shapes), shapes_of(example)


def inputs_of(scoring: ScoringModel) -> Inputs:
    """The inputs of a scoring model."""
    own = scoring.history_keys, scoring.user_keys, scoring.candidate_keys, scoring.bucket_keys
    return Inputs(*own, scoring.semantic_keys, bool(scoring.weighted_features))


def _check_weights(scoring: ScoringModel, policy: Policy | None) -> None:
    """Checks that the model reads the weights of the policy's events if there are any, and only then."""
    given, read = policy is not None and policy.is_weighted, scoring.weighted_features
    if read and not given:
        why = "a policy of histories gives weights" if policy is None else "this policy has none"
        raise ValueError(f"feature '{read[0]}' reads weights of events, which requests do not have: {why}")
    if given and not read:
        raise ValueError("the policy has weights of events, but no feature of the model reads weights")


def tables_of(model: SequenceDLRM, keys: list[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights by table of the tables that `keys` read, and the table of each key."""
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


def _dynamic(argument: object) -> object:
    """Returns the dynamic shapes of an argument: all tensors have any number of rows."""
    if isinstance(argument, dict):
        return {key: _dynamic(value) for key, value in argument.items()}
    return {0: Dim.DYNAMIC}


def write_package(program: ExportedProgram, path: Path, metadata: dict[str, str] | None = None) -> None:
    """Compiles a program and writes the AOTInductor package, with texts as metadata.

    Raises:
        ArtifactError: there is no C++ compiler, or it links the C++ standard library statically.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        # torch ends the process where it can't write a package to its path.
        package = io.BytesIO()
        try:
            options = {**_OPTIONS, "aot_inductor.metadata": dict(metadata or {})}
            aoti_compile_and_package(program, package_path=package, inductor_configs=options)
        except Exception as error:
            if (full := _storage_error(error)) is not None:
                raise full from None
            if "No working C++ compiler" not in str(error):
                raise
            raise ArtifactError(
                "AOTInductor needs a C++ compiler, and none was found: install g++, or set CXX"
            ) from error
    if not any(library in package.getvalue() for library in _CXX_LIBRARIES):
        raise ArtifactError(
            "the C++ compiler links the C++ standard library statically, and a process that loads such a package "
            "crashes: set CXX to one that links it dynamically, as the g++ of Linux distributions does"
        )
    with naming(path):
        path.write_bytes(package.getbuffer())


def _storage_error(error: BaseException | None) -> OSError | None:
    """The storage's error behind one of the compiler, which writes its files to a cache; None if there is none."""
    while error is not None:
        number = errno.EACCES if isinstance(error, PermissionError) else storage_number(str(error))
        if number is not None:
            return OSError(number, os.strerror(number), getattr(error, "filename", None) or cache_dir())
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return None
