"""Pairing the leaves of two trees by name: what goes where, and each line of what cannot."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.match import Leaf, match, rename
from tests.test_state import QUICK

W, B = Leaf("float32", (3, 4)), Leaf("float32", (4,))
HALF = Leaf("bfloat16", (3, 4))
COUNT = Leaf("int32", ())

parts = st.sampled_from(["a", "b", "head", "layers", "0", "1", "kernel", "bias"])
names = st.lists(parts, min_size=1, max_size=4).map("/".join)
leaves = st.builds(
    Leaf,
    st.sampled_from(["float32", "bfloat16", "float16", "int32", "uint32", "key<fry>"]),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
)
trees = st.dictionaries(names, leaves, max_size=8)


@QUICK
@given(leaves)
def test_a_leaf_reads_back_from_its_text(leaf):
    """As `state.describe` writes it too."""
    assert Leaf.parse(str(leaf)) == leaf


@QUICK
@given(trees)
def test_equal_trees_match_whole(tree):
    """Each leaf from itself, with nothing left over."""
    assert match(tree, tree, renames={}) == (dict(zip(tree, tree, strict=True)), [], [], [])


@QUICK
@given(trees, trees, st.booleans())
def test_every_leaf_of_both_sides_is_taken_or_named(source, target, cast):
    """No leaf is passed over in silence, and what is taken fits."""
    found = match(source, target, renames={}, cast=cast)
    assert [*found.taken, *found.missing] == sorted(target, key=lambda n: n not in source)
    assert set(found.taken.values()) | set(found.extra) == set(source)
    text = "\n".join(found.problems)
    for name in [*found.missing, *found.extra]:
        assert re.search(f"^{name}: .*no such leaf", text, re.M)
    for name, old in found.taken.items():
        a, b = source[old], target[name]
        fits = a.shape == b.shape and (a.dtype == b.dtype or (cast and a.is_float and b.is_float))
        assert fits != any(p.startswith(f"{name}: ") for p in found.problems)


@QUICK
@given(trees, trees)
def test_what_is_allowed_is_no_problem_but_still_told(source, target):
    """`.` allows all, and then only shapes and dtypes can keep a leaf back."""
    strict = match(source, target, renames={})
    loose = match(source, target, renames={}, allow_missing=["."], allow_extra=["."])
    assert loose[:3] == strict[:3]
    assert not any("no such leaf" in p for p in loose.problems)


@QUICK
@given(trees)
def test_a_prefix_can_be_taken_off_and_put_on(tree):
    """The commonest rename, both ways."""
    wrapped = {f"model/{name}": leaf for name, leaf in tree.items()}
    if tree:
        off = match(wrapped, tree, renames={"^model/": ""})
        on = match(tree, wrapped, renames={"^": "model/"})
        assert off.problems == on.problems == []
        assert list(off.taken) == list(tree) and list(on.taken) == list(wrapped)


def test_renames_apply_in_order_with_groups():
    """Like sed: a later one sees what an earlier one made."""
    found, problems = rename(
        ["encoder/layer0/weight", "encoder/layer0/bias"],
        {r"layer(\d+)": r"layers/\1", "weight$": "kernel", "^encoder/": ""},
    )
    assert problems == []
    assert found == {
        "layers/0/kernel": "encoder/layer0/weight",
        "layers/0/bias": "encoder/layer0/bias",
    }


def test_a_rename_that_matches_nothing_is_a_problem():
    """A slip of the pen, which would show as a missing leaf elsewhere."""
    assert rename(["a"], {"^encodr/": "", "a": "b"})[1] == [
        "map: '^encodr/' matches no path of the source"
    ]


def test_two_leaves_that_become_one_are_both_named():
    """Neither wins by order."""
    assert rename(["a/w", "b/w"], {"^[ab]/": ""})[1] == [
        "w: both a/w and b/w of the source would be this leaf"
    ]


CASES = {
    "shape": (
        {"w": B}, {"w": W}, {}, ["w: the trainer has float32[3,4], the source has float32[4]"]
    ),
    "dtype": (
        {"w": HALF},
        {"w": W},
        {},
        ["w: the trainer has float32[3,4], the source has bfloat16[3,4]"],
    ),
    "cast": ({"w": HALF}, {"w": W}, {"cast": True}, []),
    "cast to an integer": (
        {"w": COUNT},
        {"w": Leaf("float32", ())},
        {"cast": True},
        ["w: the trainer has float32[], the source has int32[]"],
    ),
    "missing": ({}, {"w": W}, {}, ["w: the trainer has float32[3,4], the source has no such leaf"]),
    "extra": ({"w": W}, {}, {}, ["w: the trainer has no such leaf, the source has float32[3,4]"]),
    "renamed": (
        {"old": B},
        {"w": W},
        {"renames": {"old": "w"}},
        ["w: the trainer has float32[3,4], the source has float32[4], as old"],
    ),
    "all at once": (
        {"a": W, "b": B, "d": W},
        {"a": B, "b": B, "c": W},
        {},
        [
            "a: the trainer has float32[4], the source has float32[3,4]",
            "c: the trainer has float32[3,4], the source has no such leaf",
            "d: the trainer has no such leaf, the source has float32[3,4]",
        ],
    ),
    "the only leaf": ({"": B}, {"": W}, {}, [
        "the only leaf: the trainer has float32[3,4], the source has float32[4]"
    ]),
    "missing, allowed": ({}, {"head/w": W}, {"allow_missing": ["^head/"]}, []),
    "missing, another allowed": (
        {},
        {"forehead/w": W},
        {"allow_missing": ["^head/"]},
        ["forehead/w: the trainer has float32[3,4], the source has no such leaf"],
    ),
    "extra, allowed by its new name": (
        {"lm/w": W},
        {},
        {"renames": {"^lm/": "head/"}, "allow_extra": ["^head/"]},
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_told_with_both_sides(case):
    """Each kind of difference, in words."""
    source, target, options, problems = CASES[case]
    assert match(source, target, **{"renames": {}, **options}).problems == problems
