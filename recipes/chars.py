"""A language model of bytes: a small decoder-only transformer on Python's own documentation.

    ftrain run configs/chars.yaml       about 150 seconds on 2 cores, held-out loss about 1.6

The text is what `help()` shows of the language reference, and ships with Python: the loss, in nats
a byte, was 1.66 on that of Python 3.11 and 1.57 on that of 3.12. The model is plain JAX: a tree of
arrays and a function of it. The schedule needs no help to survive faults: its count is part of the
optimizer's state, and so is committed, sent to who rejoins, and saved.
"""

from __future__ import annotations

from pydoc_data import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ftrain

VOCABULARY = 128  # ASCII; fixed, so that another Python's text does not change the model's shape
HELD_OUT = 20  # each 20th paragraph


class Windows:
    """A text cut into samples of `length` bytes to predict, each with the byte before it."""

    def __init__(self, text: np.ndarray, length: int):
        self.text, self.length = text, length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = index * self.length
        return {"tokens": self.text[start : start + self.length + 1]}

    def batch_at(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"tokens": self.text[indices[:, None] * self.length + np.arange(self.length + 1)]}


class CharsTrainer(ftrain.Trainer):
    """Trains the transformer with AdamW, clipped gradients, and warm-up before a cosine decay."""

    def __init__(
        self,
        *,
        width: int = 128,
        layers: int = 3,
        heads: int = 4,
        length: int = 64,
        dropout: float = 0.1,
        learning_rate: float = 3e-3,
        dtype: str = "float32",
    ):
        if width % heads:
            raise ValueError(f"width={width} is not divisible by heads={heads}")
        self.width, self.layers, self.heads = width, layers, heads
        self.length, self.dropout = length, dropout
        self.dtype = jnp.dtype(dtype)  # of the computation; parameters and their sums are float32
        self.training_text, self.held_out_text = load_text()
        self.learning_rate = learning_rate

    def dataset(self) -> Windows:
        return Windows(self.training_text, self.length)

    def eval_dataset(self) -> Windows:
        return Windows(self.held_out_text, self.length)

    def init_params(self, key: jax.Array) -> dict[str, Any]:
        keys = iter(jax.random.split(key, 2 + 4 * self.layers))
        width = self.width

        def matrix(rows: int, columns: int) -> jax.Array:
            return jax.random.normal(next(keys), (rows, columns)) / np.sqrt(rows)

        return {
            "embed": 0.02 * jax.random.normal(next(keys), (VOCABULARY, width)),
            "position": 0.02 * jax.random.normal(next(keys), (self.length, width)),
            "layers": [
                {
                    "attention_scale": jnp.ones(width),
                    "qkv": matrix(width, 3 * width),
                    "attention_out": matrix(width, width),
                    "mlp_scale": jnp.ones(width),
                    "mlp_in": matrix(width, 4 * width),
                    "mlp_out": matrix(4 * width, width),
                }
                for _ in range(self.layers)
            ],
            "final_scale": jnp.ones(width),
        }

    def loss(self, params: dict, batch: dict, key: jax.Array) -> ftrain.Loss:
        loss, tokens = self.mean_loss(params, batch, key)
        return ftrain.Loss(loss, {"bits": loss / np.log(2)}, weight=tokens)

    def optimizer(self) -> optax.GradientTransformation:
        steps = self.config.steps  # with `epochs` known by now: the data set has been opened
        self.schedule = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.learning_rate,
            warmup_steps=steps // 10,
            decay_steps=steps,
        )
        return optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(self.schedule, weight_decay=0.1)
        )

    def update(self, state: ftrain.TrainState, grads: Any) -> tuple[ftrain.TrainState, dict]:
        return super().update(state, grads), {"learning_rate": self.schedule(state.step)}

    def evaluate(self, state: ftrain.TrainState, batch: dict) -> tuple[dict, int]:
        loss, tokens = self.mean_loss(state.params, batch, key=None)
        return {"loss": loss, "bits": loss / np.log(2)}, tokens

    def mean_loss(self, params: dict, batch: dict, key: jax.Array | None) -> tuple[jax.Array, int]:
        """The mean loss over the tokens of a batch, in nats, and their number."""
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        params = jax.tree.map(lambda p: p.astype(self.dtype), params)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            self.logits(params, inputs, key).astype(jnp.float32), targets
        )
        return losses.mean(), losses.size

    def logits(self, params: dict, tokens: jax.Array, key: jax.Array | None) -> jax.Array:
        """Logits `[batch, length, VOCABULARY]` of each next byte; without a key, no dropout."""
        x = params["embed"][tokens] + params["position"]
        for i, layer in enumerate(params["layers"]):
            attention_key, mlp_key = (
                (None, None) if key is None else jax.random.split(jax.random.fold_in(key, i))
            )
            x += self.drop(self.attention(layer, x), attention_key)
            hidden = jax.nn.gelu(normalise(x, layer["mlp_scale"]) @ layer["mlp_in"])
            x += self.drop(hidden @ layer["mlp_out"], mlp_key)
        return normalise(x, params["final_scale"]) @ params["embed"].T

    def attention(self, layer: dict, x: jax.Array) -> jax.Array:
        """What each position takes from itself and those before it."""
        batch, length, width = x.shape
        qkv = normalise(x, layer["attention_scale"]) @ layer["qkv"]
        query, key, value = jnp.moveaxis(qkv.reshape(batch, length, 3, self.heads, -1), 2, 0)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return mixed.reshape(batch, length, width) @ layer["attention_out"]

    def drop(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        if key is None:
            return x
        kept = jax.random.bernoulli(key, 1 - self.dropout, x.shape)
        return jnp.where(kept, x / (1 - self.dropout), 0)


def normalise(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root mean square normalisation over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """Training text and held-out text as ASCII codes, uint8: about 355 and 18 thousand."""
    pages = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    # Pages repeat one another's sections: a paragraph of both texts would be known by heart.
    paragraphs = list(dict.fromkeys(pages.split("\n\n")))

    def codes(chosen: list[str]) -> np.ndarray:
        return np.frombuffer("\n\n".join(chosen).encode("ascii", "replace"), np.uint8)

    held_out = paragraphs[::HELD_OUT]
    del paragraphs[::HELD_OUT]
    return codes(paragraphs), codes(held_out)
