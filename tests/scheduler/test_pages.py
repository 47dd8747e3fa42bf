"""Pages seen through the records that use them."""

import pytest

from jcb.config import Limits
from jcb.scheduler.pages import PageLedger
from jcb.scheduler.record import Record
from tests.fakes import make_request

LIMITS = Limits(page_size=2, num_pages=9, max_model_len=64, vocab_size=100)


def ledger():
    return PageLedger(LIMITS, enable_prefix_caching=True, root=b"test")


def resident(pages, prompt, **fields):
    record = Record(make_request("a", prompt, **fields))
    pages.adopt(record, pages.match(pages.keys(record)))
    pages.grow(record, LIMITS.pages_for(len(prompt) + 1) - len(record.pages))
    return record


def test_a_page_with_an_unknown_token_is_not_published():
    pages = ledger()
    record = resident(pages, [1, 2, 3])
    record.num_pending, record.num_computed = 1, 4
    pages.publish(record)
    assert record.num_published == 1
    record.num_pending, record.output_token_ids = 0, [9]
    pages.publish(record)
    assert record.num_published == 2
    pages.drop(record)
    assert pages.match(resident(pages, [1, 2, 3, 9, 5]).digests) != []


def test_one_token_at_least_is_left_to_compute():
    pages = ledger()
    record = resident(pages, [1, 2, 3, 4])
    record.num_computed = 4
    pages.publish(record)
    pages.drop(record)
    again = resident(pages, [1, 2, 3, 4])
    assert again.num_computed == 2
    assert resident(pages, [1, 2, 3, 4, 5]).num_computed == 4


def test_a_request_for_prompt_logprobs_takes_no_hit():
    pages = ledger()
    record = resident(pages, [1, 2, 3, 4, 5])
    record.num_computed = 5
    pages.publish(record)
    assert resident(pages, [1, 2, 3, 4, 5], prompt_logprobs=1).num_computed == 0


def test_the_price_counts_cached_pages_that_nobody_holds():
    pages = ledger()
    record = resident(pages, [1, 2, 3, 4, 5])
    record.num_computed = 5
    pages.publish(record)
    hits = pages.match(record.digests)
    assert pages.price(hits, 5) == 3
    pages.drop(record)
    assert pages.price(hits, 5) == 5


def test_check_integrity_finds_a_page_that_nobody_gives_back():
    pages = ledger()
    record = resident(pages, [1, 2, 3])
    pages.check_integrity([record])
    with pytest.raises(AssertionError, match="references"):
        pages.check_integrity([])


def test_the_tail_of_a_prefix_is_reused_before_its_head():
    pages = ledger()
    record = resident(pages, range(15))
    record.num_computed = 15
    pages.publish(record)
    keys = list(record.digests)
    held = list(record.pages)
    pages.drop(record)
    other = Record(make_request("b", [50]))
    pages.grow(other, 3)
    assert other.pages == [held[7], held[6], held[5]]
    assert pages.match(keys) == held[:5]
