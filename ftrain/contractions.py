"""Contractions over several axes in a lowered program, written as contractions over one.

A weight's gradient is a contraction over the samples of a batch: over their axis, under `vmap` over
that of shards too, and over time if there is one. XLA makes one axis of several by transposing an
operand, which copies it, whatever lies beside what in memory (jax 0.10.2 and 0.12.0.1, CPU: a third
of a small perceptron's gradient of 12 shards). Where the axes are neighbours a reshape does it, and
moves nothing.

Changed is the module that the program will be compiled from, in place: `compiler_ir` gives that one
itself (the same versions; a test holds it). With another jax it might be a copy: then programs
would be slower, and right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo


def merge_contractions(lowered: jax.stages.Lowered) -> jax.stages.Lowered:
    """Merges the axes of each contraction where they are neighbours in both operands.

    The same products are added, in the order in which they lie in memory.

    Returns:
      `lowered`, changed.
    """
    module = lowered.compiler_ir("stablehlo")
    found: list[Any] = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.dot_general":
            found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for dot in found:
        with module.context, dot.location, ir.InsertionPoint(dot):
            _merge(dot)
    return lowered


def _merge(dot: Any) -> None:
    axes = stablehlo.DotDimensionNumbers(dot.attributes["dot_dimension_numbers"])
    pairs = sorted(
        zip(axes.lhs_contracting_dimensions, axes.rhs_contracting_dimensions, strict=True)
    )
    lhs, rhs = [left for left, _ in pairs], [right for _, right in pairs]
    if len(pairs) < 2 or not (_are_neighbours(lhs) and _are_neighbours(rhs)):
        return
    merged = stablehlo.DotDimensionNumbers.get(
        _without(lhs, axes.lhs_batching_dimensions),
        _without(rhs, axes.rhs_batching_dimensions),
        [lhs[0]],
        [rhs[0]],
    )
    attributes = {name: dot.attributes[name] for name in dot.attributes}
    new = ir.Operation.create(
        dot.name,
        results=[dot.results[0].type],
        operands=[_reshaped(dot.operands[0], lhs), _reshaped(dot.operands[1], rhs)],
        attributes={**attributes, "dot_dimension_numbers": merged},
    )
    dot.results[0].replace_all_uses_with(new.results[0])
    dot.erase()


def _are_neighbours(axes: Sequence[int]) -> bool:
    return list(axes) == list(range(axes[0], axes[0] + len(axes)))


def _without(merged: Sequence[int], axes: Sequence[int]) -> list[int]:
    """What `axes` are called once those of `merged` have become its first."""
    return [axis if axis < merged[0] else axis - len(merged) + 1 for axis in axes]


def _reshaped(operand: Any, merged: Sequence[int]) -> Any:
    given = ir.RankedTensorType(operand.type)
    first, end = merged[0], merged[-1] + 1
    shape = list(given.shape)
    shape[first:end] = [math.prod(shape[first:end])]
    return stablehlo.reshape(ir.RankedTensorType.get(shape, given.element_type), operand)
