"""Ragged batches as lists of (q_len, kv_len), drawn by hypothesis for both kernels' interpreters."""

from hypothesis import strategies as st


def ragged(max_rows: int, max_q: int, max_kv: int):
    """Batches as lists of (q_len, kv_len)."""
    decode = st.tuples(st.just(1), st.integers(1, max_kv))
    chunk = st.tuples(st.integers(1, max_q), st.integers(0, max_kv - max_q)).map(lambda qc: (qc[0], qc[0] + qc[1]))
    return st.lists(decode | chunk, max_size=max_rows)


def with_a_long_one(max_rows: int, max_q: int, max_kv: int):
    """Up to `max_rows` short rows with one of any length among them: the interpreter takes a second for 100 pages."""
    long = st.integers(1, max_q).flatmap(lambda q: st.tuples(st.just(q), st.integers(q, max_kv)))
    few = st.lists(long, max_size=1)
    return st.tuples(ragged(max_rows - 1, 3, 80), few, st.integers(0, max_rows)).map(
        lambda drawn: [*drawn[0][: drawn[2]], *drawn[1], *drawn[0][drawn[2] :]]
    )
