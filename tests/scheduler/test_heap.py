"""A queue whose entries may vanish."""

from hypothesis import given
from hypothesis import strategies as st

from jcb.scheduler.heap import KeyedHeap

ACTIONS = st.lists(st.tuples(st.sampled_from(["push", "discard", "pop"]), st.integers(0, 9), st.integers(0, 9)))


@given(ACTIONS)
def test_agrees_with_a_dictionary(actions):
    heap, keys = KeyedHeap(), {}
    for action, number, key in actions:
        name = str(number)
        if action == "push":
            heap.push(name, key)
            keys[name] = key
        elif action == "discard":
            heap.discard(name)
            keys.pop(name, None)
        elif keys:
            assert heap.first() == min((key, name) for name, key in keys.items())
            _, name = heap.first()
            heap.discard(name)
            del keys[name]
        assert len(heap) == len(keys)
        assert (heap.first() is None) == (not keys)
        assert all((str(n) in heap) == (str(n) in keys) for n in range(10))


def test_memory_follows_the_live_names():
    heap = KeyedHeap()
    heap.push("stays", -1)
    for number in range(10_000):
        heap.push(str(number), number)
        heap.discard(str(number))
    assert len(heap._heap) < 100
    assert heap.first() == (-1, "stays")
