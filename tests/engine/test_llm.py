"""The engine as a function."""

import pytest

from jcb.config import ServeConfig
from jcb.config_file import override
from jcb.engine.llm import LLM
from jcb.types import FinishReason, RequestError, SamplingParams
from tests.fake_model import fake_engine


@pytest.fixture
def llm():
    return LLM.from_engine(fake_engine(max_num_seqs=4, max_queued=4))


GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def test_answers_come_in_the_order_of_the_prompts(llm):
    prompts = [f"prompt {i}" for i in range(30)]  # far more than may wait
    together = llm.generate(prompts, GREEDY)
    assert [result.text for result in together] == [llm.generate(p, GREEDY)[0].text for p in prompts]
    assert all(len(result.token_ids) == 6 for result in together)
    llm.engine.core.scheduler.check_integrity()
    assert llm.engine.executor.violations == []


def test_text_ids_and_one_params_for_each(llm):
    ids = llm.engine.tokenizer.encode("brown fox")
    by_text, by_ids = llm.generate("brown fox", GREEDY), llm.generate([ids], GREEDY)
    assert by_text[0].outputs == by_ids[0].outputs
    assert by_text[0].prompt_token_ids == tuple(ids)
    results = llm.generate(["a", "b"], [GREEDY, SamplingParams(n=3, max_tokens=2, ignore_eos=True)])
    assert [len(result.outputs) for result in results] == [1, 3]
    assert [choice.index for choice in results[1].outputs] == [0, 1, 2]
    with pytest.raises(ValueError, match="2 sampling params for 1 prompts"):
        llm.generate("a", [GREEDY, GREEDY])
    assert llm.generate([], GREEDY) == []


def test_what_a_result_tells(llm):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1, stop=("zz",))
    prompt = list(b"a prompt of some pages")
    first, second = llm.generate([prompt, prompt], params)[0], llm.generate([prompt], GREEDY)[0]
    assert len(first.outputs[0].logprobs) == len(first.token_ids)
    assert len(first.prompt_logprobs) == len(prompt) - 1
    assert first.outputs[0].finish_reason is FinishReason.LENGTH
    assert second.num_cached_tokens > 0


def test_stop_strings(llm):
    llm.engine.executor.script[tuple(b"p")] = list(b"hello world")
    (result,) = llm.generate("p", SamplingParams(max_tokens=11, stop=("lo w",)))
    assert (result.text, result.outputs[0].stop_reason) == ("hel", "lo w")


def test_a_refusal_leaves_nothing_behind(llm):
    with pytest.raises(RequestError):
        llm.generate(["a", "b"], [GREEDY, SamplingParams(top_p=2)])
    with pytest.raises(RequestError):
        llm.generate(["a"] * 20 + ["x" * 300], GREEDY)
    assert not llm.engine.core.has_work
    assert llm.engine.core.scheduler.stats()["pages_used"] == 0


def test_chat_uses_the_template(llm):
    result = llm.chat([{"role": "user", "content": "Hi"}], GREEDY)
    rendered = llm.engine.chat_template.render([{"role": "user", "content": "Hi"}])
    assert llm.engine.tokenizer.decode(result.prompt_token_ids, skip_special_tokens=False) == rendered
    assert result.outputs[0].finish_reason is FinishReason.LENGTH


def test_progress_is_shown(llm, capsys):
    llm.generate(["a", "b"], GREEDY, progress=True)
    assert capsys.readouterr().err.endswith("2 of 2 done\n")


def test_settings_by_name():
    config = override(ServeConfig(), {"max_num_seqs": 3, "page_size": 32, "dtype": "float32", "seed": 4})
    assert (config.scheduler.max_num_seqs, config.cache.page_size, config.dtype) == (3, 32, "float32")
    assert config.engine.seed == 4
    with pytest.raises(ValueError, match=r"unknown setting 'max_num_seq'; did you mean 'scheduler\.max_num_seqs'"):
        override(ServeConfig(), {"max_num_seq": 3})
    with pytest.raises(ValueError, match="page_size=3"):
        override(ServeConfig(), {"page_size": 3})
