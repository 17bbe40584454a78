"""Contractions over several axes become contractions over one, and give the same."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ftrain.contractions import merge_contractions


def contraction(x: tuple[int, ...], y: tuple[int, ...], axes, batch=((), ())):
    """A program of one, its operands, and what numpy's product of them is."""
    random = np.random.default_rng(0)
    operands = [random.integers(-9, 9, shape).astype(np.float32) for shape in (x, y)]

    def dot(a, b):
        return jax.lax.dot_general(a, b, (axes, batch))

    letters = list("abcdefgh"[: len(x)]), list("ijklmnop"[: len(y)])
    for pairs in (axes, batch):
        for left, right in zip(*pairs, strict=True):
            letters[1][right] = letters[0][left]
    taken = {letters[0][i] for i in axes[0]}
    kept = [letters[0][i] for i in batch[0]]
    for side in letters:
        kept += [letter for letter in side if letter not in taken and letter not in kept]
    wanted = np.einsum(f"{''.join(letters[0])},{''.join(letters[1])}->{''.join(kept)}", *operands)
    return jax.jit(dot).lower(*operands), operands, wanted


def axes_in(lowered: jax.stages.Lowered) -> list[str]:
    """The axes that its contractions are over."""
    return re.findall(r"contracting_dims = (\[.*?\] x \[.*?\])", lowered.as_text())


@pytest.mark.parametrize(
    "x, y, axes, batch, merged",
    [
        ((4, 5, 6), (4, 5, 7), ((0, 1), (0, 1)), ((), ()), "[0] x [0]"),
        ((4, 5, 6), (4, 5, 7), ((1, 0), (1, 0)), ((), ()), "[0] x [0]"),
        ((6, 4, 5), (4, 5, 7), ((1, 2), (0, 1)), ((), ()), "[1] x [0]"),
        ((2, 3, 4, 6), (7, 2, 3, 4), ((0, 1, 2), (1, 2, 3)), ((), ()), "[0] x [1]"),
        ((3, 4, 5, 6), (4, 5, 7, 3), ((1, 2), (0, 1)), ((0,), (3,)), "[1] x [0]"),
        ((4, 6, 5), (4, 5, 7), ((0, 2), (0, 1)), ((), ()), "[0, 2] x [0, 1]"),
        ((4, 5, 6), (5, 4, 7), ((0, 1), (1, 0)), ((), ()), "[0, 1] x [1, 0]"),
        ((5, 6), (5, 7), ((0,), (0,)), ((), ()), "[0] x [0]"),
        ((5, 6), (7,), ((), ()), ((), ()), "[] x []"),
    ],
)
def test_neighbouring_axes_become_one_and_the_product_is_the_same(x, y, axes, batch, merged):
    """Others are left as they are: three that are apart, or in another order in the other one."""
    lowered, operands, wanted = contraction(x, y, axes, batch)
    assert merge_contractions(lowered) is lowered
    assert axes_in(lowered) == [merged]
    np.testing.assert_array_equal(lowered.compile()(*operands), wanted)


def test_what_is_compiled_is_the_merged_program():
    """Nothing is copied any more. It would be if jax gave a copy of the module to change."""
    program = ((12, 52, 64), (12, 52, 256), ((0, 1), (0, 1)))
    plain, merged = contraction(*program)[0], merge_contractions(contraction(*program)[0])
    assert "copy" in plain.compile().as_text()
    assert "copy" not in merged.compile().as_text()


def test_a_gradient_over_shards_and_time_is_the_same_in_a_loop_too():
    """Inside a scan, under vmap: whatever the contraction stands in."""

    def loss(w, x):
        def body(carry, _):
            return jnp.tanh(jnp.einsum("bth,hk->btk", carry, w)), None

        return jax.lax.scan(body, x, None, length=3)[0].mean()

    def gradient(w, x):
        return jax.grad(lambda w: jax.vmap(loss, (None, 0))(w, x).sum())(w)

    w, x = jnp.eye(8) + 0.1, jnp.arange(4 * 3 * 5 * 8, dtype=jnp.float32).reshape(4, 3, 5, 8) / 480
    lowered = jax.jit(gradient).lower(w, x)
    assert "[0, 1, 2] x [0, 1, 2]" in axes_in(lowered)
    merged = merge_contractions(lowered)
    assert all("," not in axes for axes in axes_in(merged))
    np.testing.assert_allclose(merged.compile()(w, x), gradient(w, x), rtol=1e-5)
