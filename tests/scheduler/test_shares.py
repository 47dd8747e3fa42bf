"""Turns of users, counted in tokens."""

from hypothesis import given
from hypothesis import strategies as st

from jcb.scheduler.shares import Shares


def test_a_user_queues_behind_itself_and_a_new_one_begins_where_the_others_are():
    shares = Shares()
    assert [shares.claim("a", 100) for _ in range(3)] == [0, 100, 200]
    assert shares.claim("b", 10) == 0
    shares.begin(100)
    assert shares.claim("c", 10) == 100
    assert shares.claim("b", 10) == 100
    shares.charge("b", 500)
    assert shares.claim("b", 10) == 610


def test_users_who_are_not_ahead_are_forgotten():
    shares = Shares()
    for user in range(10_000):
        shares.begin(shares.claim(str(user), 1) + 1)
    assert len(shares._next) < 200


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 50)), max_size=60))
def test_waiting_users_are_served_alike_up_to_one_request(asks):
    shares = Shares()
    queue = sorted((shares.claim(user, tokens), number, user, tokens) for number, (user, tokens) in enumerate(asks))
    served = dict.fromkeys("abcd", 0)
    for position, (_, _, user, tokens) in enumerate(queue):
        served[user] += tokens
        waiting = {other for _, _, other, _ in queue[position + 1 :]}
        assert all(served[user] <= served[other] + 50 for other in waiting)
