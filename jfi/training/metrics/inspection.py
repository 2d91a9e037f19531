"""Inspection of a model on the rows of a table: how much each input matters, and what targets attend to."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jfi.data import Batch, DataError, DataSchema
from jfi.data.config import HISTORY
from jfi.data.prepared.scoring import ScoringRows
from jfi.models import SequenceDLRM
from jfi.training.metrics.label_metrics import Predictions


def permute_inputs(
    model: SequenceDLRM, rows: ScoringRows, schema: DataSchema, weights: list[float], batch_size: int
) -> dict:
    """Permutation importance: how far the metric falls where an input is shuffled between the rows of a batch.

    The inputs are the columns of the user, the item and the context, the whole history, which is given to another row,
    and each column of its events, which is shuffled between the events.

    Args:
        model: in evaluation mode.
        rows: some have a label.
        schema: of the run.
        weights: of the losses of the labels.
        batch_size: rows that are shuffled together.

    Returns:
        `metric`, auc or of a regression r2; its `value` as the rows are; the number of `samples`; and `drops`, by input
        how far the metric falls, the largest first.
    """
    labels = rows.labels if rows.labels.ndim == 1 else rows.labels[:, 0]
    device, random = next(model.parameters()).device, np.random.default_rng(0)
    found: dict[str, Predictions] = {}
    with torch.inference_mode():
        for batch in rows.dataset.batches("rows", batch_size, batching="sample"):
            number = rows.rows[batch.samples.numpy()]
            chosen = torch.from_numpy(~np.isnan(labels[number]))
            label = torch.from_numpy(rows.labels[number])[chosen]
            for name, dense, sparse in _inputs(batch, schema, random):
                logits = model(dense.to(device), sparse.to(device), None).float().cpu()
                logits = logits.squeeze(-1) if len(schema.labels) == 1 else logits
                found.setdefault(name, Predictions()).add(logits[chosen], label, batch.users[chosen])
    metric = "auc" if any(label.task == "binary" for label in schema.labels) else "r2"
    values = {name: one.metrics(schema.labels, weights)[metric] for name, one in found.items()}
    value = values.pop("")
    drops = {name: value - one for name, one in sorted(values.items(), key=lambda pair: pair[1])}
    return {"metric": metric, "value": value, "samples": int((~np.isnan(labels)).sum()), "drops": drops}


def _inputs(
    batch: Batch, schema: DataSchema, random: np.random.Generator
) -> Iterator[tuple[str, Tensor, KeyedJaggedTensor]]:
    """Yields the features of the batch under the name "", then by input with that input shuffled."""
    dense, sparse = batch.dense_features, batch.sparse_features.to_dict()
    yield "", dense, batch.sparse_features
    inputs: dict[str, list[str]] = {}
    for spec in schema.features:
        if spec.history:
            inputs.setdefault(spec.history, []).append(spec.key)
        inputs.setdefault(f"{spec.history or spec.role} {spec.column}", []).append(spec.key)
    for name, keys in inputs.items():
        of_events = name.partition(" ")[0] in schema.histories and " " in name
        order = torch.from_numpy(random.permutation(len(sparse[keys[0]].values()) if of_events else len(batch.users)))
        changed = {key: _in_order(sparse[key], order, of_events) for key in keys}
        yield name, dense, KeyedJaggedTensor.from_jt_dict(sparse | changed)
    for index, column in enumerate(schema.dense_names):
        changed = dense.clone()
        changed[:, index] = dense[torch.from_numpy(random.permutation(len(dense))), index]
        yield f"number {column}", changed, batch.sparse_features


def _in_order(one: JaggedTensor, order: Tensor, of_events: bool) -> JaggedTensor:
    """Returns the lists of the samples, or their values without regard to the lists, in another order."""
    values, weights, lengths = one.values(), one.weights_or_none(), one.lengths()
    if not of_events:
        starts, lengths = one.offsets()[:-1][order], lengths[order]
        ends = lengths.cumsum(0)
        order = torch.repeat_interleave(starts - ends + lengths, lengths) + torch.arange(len(values))
    return JaggedTensor(values[order], None if weights is None else weights[order], lengths)


@torch.no_grad()
def attention(model: SequenceDLRM, rows: ScoringRows, items: pa.Array, batch_size: int) -> pa.Table:
    """Returns the attention weights of the events of the rows' histories, see `SavedRun.attention`.

    Args:
        model: in evaluation mode.
        rows: the rows.
        items: the ids of the items of the rows.
        batch_size: rows per call of the model.

    Raises:
        ValueError: the model has another pooling than attention.
        DataError: there are no rows.
    """
    device, parts = next(model.parameters()).device, []
    if rows.dataset is None:
        raise DataError("attention: no rows")
    events = rows.dataset.arrays().events
    for batch in rows.dataset.batches("rows", batch_size, batching="sample"):
        found = model.attention_weights(batch.dense_features.to(device), batch.sparse_features.to(device))
        of_histories = rows.dataset.histories_of("rows", batch.samples.numpy())
        features = iter(found.items())  # as many for each history
        for history, (lengths, chosen) in of_histories.items():
            columns = {
                "row": np.repeat(rows.rows[batch.samples.numpy()], lengths),
                "event": np.arange(len(chosen)) - np.repeat(lengths.cumsum() - lengths, lengths),
                "item": items.take(pa.array(events.item[chosen])),
                "time": events.time[chosen],
            }
            if len(of_histories) > 1:
                columns["history"] = pa.array([history]).take(pa.array(np.zeros(len(chosen), np.int64)))
            own = [*islice(features, len(found) // len(of_histories))]
            for name, weights in own:
                of = "" if len(own) == 1 else f"{HISTORY}{name.removeprefix(history)}_"
                for head, values in enumerate(weights.values().float().mean(1).unbind(1), 1):  # the mean over queries
                    columns[f"weight_{of}{head}"] = values.cpu().numpy()
            parts.append(pa.table(columns))
    order = ["row", *(["history"] if "history" in parts[0].column_names else []), "event"]
    return pa.concat_tables(parts).sort_by([(name, "ascending") for name in order])
