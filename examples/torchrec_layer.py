"""A TorchRec model with a history of events as one more feature of its interaction; docs/integration.md explains it.

python examples/torchrec_layer.py

The batch is drawn at random: a sample is a positive if the target's category is among those of its history.
"""

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

import jfi

D, USERS, ITEMS = 16, 50, 40


class Model(nn.Module):
    """The user's and the target's embeddings, what the target attends to in the history, and their dot products."""

    def __init__(self) -> None:
        super().__init__()
        bags = {"user": USERS, "item": ITEMS}
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=f"t_{name}", embedding_dim=D, num_embeddings=rows, feature_names=[name])
                for name, rows in bags.items()
            ]
        )
        events = EmbeddingConfig(name="t_history", embedding_dim=D, num_embeddings=ITEMS, feature_names=["history"])
        self.history = jfi.JaggedFeatureInteraction(
            [jfi.SequenceFeatureConfig("taste", sequence_keys=["history"], target_keys=["item"])],
            embedding_dim=D,
            num_heads=2,
            embedding_collection=EmbeddingCollection(tables=[events]),
        )
        self.over = nn.Sequential(nn.Linear(3 * D + 3, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.bags(ids)
        taste = self.history(ids, pooled)["taste"]
        vectors = torch.stack([pooled["user"], pooled["item"], taste], dim=1)
        products = (vectors @ vectors.transpose(1, 2))[:, [0, 0, 1], [1, 2, 2]]
        return self.over(torch.cat([vectors.flatten(1), products], dim=1)).squeeze(1)


def draw(samples: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Returns a batch and its labels."""
    user, item = torch.randint(USERS, (samples,)), torch.randint(ITEMS, (samples,))
    lengths = torch.randint(0, 10, (samples,))
    history = torch.randint(ITEMS, (int(lengths.sum()),))
    owner = torch.repeat_interleave(torch.arange(samples), lengths)
    same = (history % 8 == item[owner] % 8).float()  # an item's category is its remainder by 8
    label = torch.zeros(samples).index_add(0, owner, same).clamp(max=1)
    ones = torch.ones(samples, dtype=torch.int64)
    ids = KeyedJaggedTensor(
        keys=["user", "item", "history"],
        values=torch.cat([user, item, history]),
        lengths=torch.cat([ones, ones, lengths]),
    )
    return ids, label


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for step in range(301):
    ids, label = draw(512)
    logits = model(ids)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 0:
        constant = nn.functional.binary_cross_entropy(label.mean().expand_as(label), label)
        print(f"step {step}: loss {loss.item():.4f}, of the mean label {constant.item():.4f}")
