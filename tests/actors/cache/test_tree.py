"""The radix tree and the page table, compared with a set of paths and a count of the users of each page."""

import random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from baton.actors.cache.pages import PageError, PagePool
from baton.actors.cache.radix import Node, RadixTree, path_to_root
from baton.actors.cache.worth.by_age import ByAge
from baton.actors.lease import Ledger
from baton.actors.runtime.explain import explain_tree
from baton.actors.tokens import common_prefix, pack, unpack

sequences = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def walk(node: Node) -> list[int]:
    return unpack(b"".join(step.tokens for step in reversed(list(path_to_root(node)))))


@given(st.lists(st.integers(0, 1), max_size=20), st.lists(st.integers(0, 1), max_size=20))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(pack(a), pack(b)) == expected


@settings(max_examples=200)
@given(st.lists(sequences, max_size=8), sequences, st.integers(0, 12), st.integers(1, 4))
def test_match_finds_the_deepest_state_and_the_known_path(
    inserted: list[list[int]], prompt: list[int], limit: int, page_size: int
) -> None:
    pages, ledger = PagePool(200, page_size), Ledger(20)
    tree = RadixTree(pages)
    for tokens in inserted:
        table = pages.take(pages.cover(len(tokens)))
        node = tree.insert(tree.match("", b"", 0).node, pack(tokens), table)
        pages.drop_grant_refs(table)
        assert walk(node) == tokens
        if node.state is None:
            lease = ledger.take("cache")
            assert lease
            ledger.cache(lease, node.id)
            tree.set_state(node, lease)
    match = tree.match("", pack(prompt), limit)
    ends = [len(t) for t in inserted if t == prompt[: len(t)] and len(t) <= limit]
    known = [common_prefix(pack(t), pack(prompt)) for t in inserted]
    assert match.node.end == max(ends, default=0)
    assert match.tokens == max(known, default=0)
    named = [0] * len(pages)
    for node in tree.nodes:
        assert len(tree.page_table(node)) == pages.cover(node.end)
        for page in node.pages:
            named[page] += 1
    assert named == pages.node_refs
    assert pages.free == named.count(0)
    ledger.close()


def test_the_page_of_a_leaf_replaces_the_partial_page_above() -> None:
    pages = PagePool(10, 4)
    tree = RadixTree(pages)
    root = tree.match("", b"", 0).node
    first = pages.take(2)
    node = tree.insert(root, pack([1, 2, 3, 4, 5, 6]), first)
    copied = pages.take(1)
    leaf = tree.insert(node, pack([7, 8, 9]), [first[0], copied[0], *pages.take(1)])
    assert node.pages == [first[0], copied[0]] and leaf.pages[0] == copied[0]
    assert pages.node_refs[first[1]] == 0


def test_salts_keep_tenants_apart() -> None:
    pages = PagePool(0, 1)
    tree = RadixTree(pages)
    tree.insert(tree.match("a", b"", 0).node, pack([1, 2, 3]), [])
    assert tree.match("a", pack([1, 2, 3]), 3).tokens == 3
    assert tree.match("b", pack([1, 2, 3]), 3).tokens == 0


def test_a_root_goes_with_its_last_leaf() -> None:
    tree = RadixTree(PagePool(0, 1))
    leaf = tree.insert(tree.match("a", b"", 0).node, pack([1, 2]), [])
    assert "a" in tree.roots and tree.tokens == 2
    tree.remove(leaf)
    assert tree.roots == {} and tree.tokens == 0


@pytest.mark.parametrize("seed", range(20))
def test_pages_against_a_simple_count(seed: int) -> None:
    rng, pages = random.Random(seed), PagePool(12, 4)
    users: list[int] = []
    names: list[int] = []
    for _ in range(300):
        move = rng.choice(["take", "share", "release", "name", "unname"])
        held = sorted({*users, *names})
        if move == "take" and pages.free:
            users += pages.take(1)
        elif move == "share" and held:
            users.append(rng.choice(held))
            pages.add_grant_refs(users[-1:])
        elif move == "name" and held:
            names.append(rng.choice(held))
            pages.add_node_refs(names[-1:])
        elif move == "release" and users:
            pages.drop_grant_refs([users.pop(rng.randrange(len(users)))])
        elif move == "unname" and names:
            pages.drop_node_refs([names.pop(rng.randrange(len(names)))])
        assert pages.free == 12 - len({*users, *names})
        assert pages.used == len(set(users))
        assert pages.cached == len(set(names) - set(users))


def test_a_free_page_cannot_be_shared_or_dropped() -> None:
    pages = PagePool(2, 4)
    for use in (pages.add_grant_refs, pages.drop_grant_refs, pages.add_node_refs, pages.drop_node_refs):
        with pytest.raises(PageError):
            use([0])
    with pytest.raises(PageError, match="3 pages wanted, 2 free"):
        pages.take(3)


def test_salts_are_distinguished_but_not_shown() -> None:
    tree: RadixTree[Any] = RadixTree(PagePool(4, 4))
    for salt in ("", "secret", "other"):
        tree.match(salt, b"", 0)
    none, secret, other = (node["salt"] for node in explain_tree(tree, ByAge()))
    assert none == ""
    assert secret != other and "secret" not in str(secret)


# The reason why a match finds no deeper state, and the order in which nodes are evicted


def build(*states: list[int]) -> tuple[RadixTree[str], list[Node[str]]]:
    """Build a tree without pages that has a state at the end of each token sequence in `states`."""
    tree: RadixTree[str] = RadixTree(PagePool(0, 1))
    nodes = [tree.insert(tree.match("", b"", 0).node, pack(tokens), []) for tokens in states]
    for node in nodes:
        tree.set_state(node, "state")
    return tree, nodes


def test_why_a_match_is_not_as_deep_as_it_might_be() -> None:
    tree, (short, long) = build([1, 2], [1, 2, 3, 4])
    prompt = pack([1, 2, 3, 4, 5])

    def why(limit: int) -> tuple[int, str]:
        match = tree.match("", prompt, limit)
        return match.node.end, match.miss_reason

    assert (why(4), why(2), why(9)) == ((4, ""), (2, ""), (4, ""))
    assert (why(3), why(1)) == ((2, "misaligned"), (0, "misaligned"))
    tree.take_state(long)
    assert why(4) == (2, "never_kept")
    long.evicted = True
    assert (why(4), why(3)) == ((2, "evicted"), (2, "never_kept")), "it would not have been of use"
    tree.take_state(short)
    assert why(4) == (0, "evicted"), "the more informative of two reasons"
    tree.set_state(long, "state")
    assert why(4) == (4, "") and not long.evicted


def test_nodes_are_in_order_of_use_with_descendants_before_ancestors() -> None:
    tree, (first, deeper, other) = build([1, 2], [1, 2, 3], [7])
    assert list(tree.states) == [first, deeper, other]
    tree.touch(deeper)
    assert list(tree.nodes) == [other, deeper, first] and list(tree.states) == [first, other, deeper]
    tree.touch(other)
    assert list(tree.nodes) == [deeper, first, other] and list(tree.states) == [first, deeper, other]


def test_the_pins_of_a_removed_leaf_move_to_its_parent() -> None:
    tree, (above, leaf) = build([1], [1, 2])
    leaf.pins = 2
    tree.take_state(leaf)
    tree.remove(leaf)
    assert above.pins == 2 and tree.tokens == 1 and not above.children
    root = above.parent
    assert root is not None
    root.pins = 1
    tree.take_state(above)
    tree.remove(above)
    assert tree.roots == {"": root}, "a grant is pinned there"
    root.pins = 1
    tree.unpin(root)
    assert tree.roots == {}


def test_no_two_nodes_have_one_id() -> None:
    tree: RadixTree[str] = RadixTree(PagePool(0, 1))
    for salt in ("", "tenant"):
        root = tree.match(salt, b"", 0).node
        for tokens in ([1, 2, 3], [1, 2, 4], [5]):
            tree.insert(root, pack(tokens), [])
    nodes = [*tree.roots.values(), *tree.nodes]
    assert len(nodes) == 10 and len({node.id for node in nodes}) == 10


def test_a_cleared_tree_is_empty_and_of_a_new_epoch() -> None:
    pages = PagePool(4, 2)
    tree: RadixTree[str] = RadixTree(pages)
    table = pages.take(2)
    old_root = tree.match("", b"", 0).node
    node = tree.insert(old_root, pack([1, 2, 3]), table)
    pages.drop_grant_refs(table)
    tree.set_state(node, "state")
    bare = tree.insert(node, pack([4]), [])
    assert tree.clear() == [node] and bare not in tree.nodes
    assert (tree.epoch, tree.tokens, pages.free, len(tree.states), len(tree.nodes)) == (1, 0, 4, 0, 0)
    new_root = tree.match("", b"", 0).node
    old_root.children.clear()
    tree._trim(old_root)
    assert tree.roots == {"": new_root} and new_root is not old_root and new_root.id != old_root.id


def test_looking_for_a_state_under_an_unknown_salt_adds_no_root() -> None:
    tree, _ = build([1])
    assert tree.deepest("other", pack([1]), 1) is None and set(tree.roots) == {""}
    assert tree.deepest("", pack([2]), 1) is None and tree.deepest("", pack([1]), 0) is None


@pytest.mark.parametrize("cut_at", range(1, 8))
def test_a_path_that_parts_inside_a_page_names_it_on_both_sides(cut_at: int) -> None:
    pages = PagePool(8, 3)
    tree: RadixTree[str] = RadixTree(pages)
    table = pages.take(3)
    leaf = tree.insert(tree.match("", b"", 0).node, pack(range(8)), table)
    other = tree.insert(tree.match("", b"", 0).node, pack([*range(cut_at), 9]), [*table[: cut_at // 3], *pages.take(1)])
    upper = leaf.parent
    assert upper is not None and other.parent is upper and (upper.start, upper.end, leaf.start) == (0, cut_at, cut_at)
    assert leaf.pages == table[cut_at // 3 :] and tree.page_table(leaf) == table
    assert len(other.pages) == 1 and tree.page_table(other) == [*table[: cut_at // 3], *other.pages]
    assert tree.tokens == 9 and unpack(leaf.tokens) == list(range(cut_at, 8))
