"""Both engines: the same text, the same refusals, everything bounded."""

import time
from datetime import datetime

import pytest

from jcb.text import template_engines
from jcb.text.frozen import freeze
from jcb.text.template_engines import Jinja2Engine, MiniJinjaEngine, TemplateError, make_engine

pytest.importorskip("minijinja")

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
TOOLS = """\
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}{{ tool | tojson }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.last < 0 and message.role == "user" and not(message.content.startswith('<x>')) %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- message.role + '\\n' + message.content.strip().split('</think>')[-1].lstrip('\\n') }}
    {%- elif message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {{- call.function.name ~ ': ' }}{{ call.function.arguments | tojson(indent=2) }}
            {%- for key, value in call.function.arguments.items() %}[{{ key }}={{ value }}]{% endfor %}
        {%- endfor %}
    {%- else %}{%- continue %}{%- endif %}
{%- endfor %}
{{ ns.last }}
{% if enable_thinking is defined and enable_thinking is false %}off{% endif %}
"""
MESSAGES = [
    {"role": "system", "content": "Sei «nett» & <b>kurz</b>."},
    {"role": "user", "content": "  Was ist 1 < 2?\n</think>\nx'\"  "},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "rechne", "arguments": {"b": [1, None, True], "a": "é<&>'"}}}],
    },
    {"role": "user", "content": ""},
]
TOOL = {"type": "function", "function": {"name": "rechne", "parameters": {"type": "object", "properties": {"ü": {}}}}}
VARIABLES = {
    "messages": MESSAGES,
    "tools": [TOOL],
    "bos_token": "<s>",
    "add_generation_prompt": True,
    "enable_thinking": False,
}


def render(engine, source, **variables):
    return engine(source, lambda: datetime(2024, 2, 29)).render(freeze({**VARIABLES, **variables}))


SAME = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "tools": TOOLS,
    "no escaping": "{{ messages[0].content }}",
    "json": "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ {'a': 1.5, 'b': none} | tojson }}",
    "date": "{{ strftime_now('%d %b %Y') }}",
    "blocks are trimmed": "  {% if true %}\n  x\n  {% endif %}\n y\n",
    "loop controls": "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
    "{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "generation marks": "a{% generation %}b{%- endgeneration -%}c",
    "undefined is empty": "[{{ nothing }}]{{ nothing is defined }}",
    "printing": "{{ none }}{{ true }}{{ 1.0 }}{{ [1, 'a', none] }}{{ {'a': 1} }}",
    "strings": "{{ 'a b'.split(' ')[-1] }}{{ ' x '.strip() }}{{ 'ab'[::-1] }}{{ 'x' ~ 1 ~ none }}"
    "{{ 'aXa'.lower().replace('a', 'bb') }}",
    "macro": "{% macro f(x, y=2) %}<{{ x }}{{ y }}>{% endmacro %}{{ f(1) }}{{ f(1, y='q') }}",
    "filters": "{{ [3, 1, 2] | sort | join(',') }}{{ 'a' | upper }}"
    "{{ messages | map(attribute='role') | unique | join }}",
    "indent and format": "{{ 'a\nb' | indent(3) }}{{ '%s-%d' | format('x', 2) }}",
    "set block": "{% set x %}a{{ 1 }}{% endset %}{{ x * 3 }}",
}


@pytest.mark.parametrize("name", SAME)
def test_both_engines_give_the_same_text(name):
    text = render(MiniJinjaEngine, SAME[name])
    assert text == render(Jinja2Engine, SAME[name])
    assert text


def test_what_the_text_is():
    assert render(MiniJinjaEngine, SAME["date"]) == "29 Feb 2024"
    assert render(MiniJinjaEngine, SAME["blocks are trimmed"]) == "  x\n y"
    assert render(MiniJinjaEngine, SAME["loop controls"]) == "0134"
    assert render(MiniJinjaEngine, SAME["generation marks"]) == "abc"
    assert '"a": "é<&>\'"' in render(MiniJinjaEngine, TOOLS)


REFUSED = {
    "raise_exception": "{{ raise_exception('roles must alternate') }}",
    "a file": "{% include 'x' %}",
    "a module": "{% import 'os' as os %}{{ os }}",
    "a class": "{{ ''.__class__.__mro__ }}",
    "subclasses": "{{ messages.__class__.__base__.__subclasses__() }}",
    "globals of a function": "{{ raise_exception.__globals__['x'] }}",
    "format of attributes": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "changing messages": "{% do messages.append(1) %}",
    "changing a message": "{% do messages[0].update({'role': 'x'}) %}",
    "changing a copy": "{% do messages.copy().extend(messages) %}",
    "lipsum": "{{ lipsum(n=100) }}",
    "debug": "{{ debug() }}",
    "an undefined attribute": "{{ nothing.at.all }}",
    "an odd indent": "{{ 1 | tojson(indent=100000) }}",
    "repeat": "{{ 'a' * 1000000000 }}",
    "repeat a list": "{{ [0] * 1000000000 }}",
    "range": "{{ range(1000000000) | length }}",
    "power": "{{ 10 ** 10 ** 10 ** 10 }}",
    "padding": "{{ 'x'.center(1000000000) }}",
    "padding filter": "{{ 'x' | center(1000000000) }}",
    "indent": "{{ 'a\nb' | indent(1000000000) }}",
    "wide format": "{{ '%1000000000d' | format(1) }}",
    "wide format by value": "{{ '%*d' | format(1000000000, 1) }}",
    "wide percent": "{{ '%1000000000d' % 1 }}",
    "wide braces": "{{ '{:1000000000}'.format(1) }}",
    "many wide fields": "{{ ('%s' * 100000) | format(*(['x' * 1000] * 100000)) }}",
    "a long join": "{{ 'abc'.join(('x,' * 1000000).split(',') * 10) }}",
    "a long join filter": "{{ (('x,' * 1000000).split(',') * 10) | join('abc') }}",
    "a growing replace": "{{ ('a' * 100000).replace('a', 'b' * 10000) }}",
    "a growing replace filter": "{{ ('a' * 100000) | replace('a', 'b' * 10000) }}",
    "wide batches": "{{ [1] | batch(1000000000, 'x') | list | length }}",
    "many slices": "{{ [1] | slice(1000000000) | list | length }}",
    "nested braces": "{{ '{:{}}'.format(1, 1000000000) }}",
    "doubling by +": "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by ~": "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by set": "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}"
    "{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
    "{% set n.x = y %}{% endfor %}",
    "a long loop with output": "{% for i in range(90000) %}{% for j in range(90000) %}x{% endfor %}{% endfor %}",
    "a long loop without": "{% set r = range(90000) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "endless recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "too much output": "{% set x = 'a' * 1000000 %}{% for i in range(1000) %}{{ x }}{% endfor %}",
}


@pytest.mark.parametrize("engine", [MiniJinjaEngine, Jinja2Engine])
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_template_may_do_is_refused_soon(monkeypatch, engine, name):
    monkeypatch.setattr(template_engines, "MAX_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(TemplateError) as caught:
        render(engine, REFUSED[name])
    assert time.monotonic() - start < 10
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("engine", [MiniJinjaEngine, Jinja2Engine])
def test_the_template_says_why_it_refuses(engine):
    with pytest.raises(TemplateError, match=r"^roles must alternate$"):
        render(engine, REFUSED["raise_exception"])


@pytest.mark.parametrize("engine", [MiniJinjaEngine, Jinja2Engine])
@pytest.mark.parametrize("source", ["{{", "{% if %}", "{% for x in y %}", "{% nonsense %}", "{{ " + "(" * 50_000])
def test_unreadable_templates_are_refused_when_made(engine, source):
    with pytest.raises(TemplateError, match="cannot be read"):
        engine(source)


@pytest.mark.parametrize("engine", [MiniJinjaEngine, Jinja2Engine])
def test_a_full_body_of_messages_is_within_the_bounds(engine):
    content = "x" * (4 * 1024 * 1024)
    assert len(render(engine, CHATML, messages=[{"role": "user", "content": content}])) > len(content)
    many = [{"role": "user", "content": "x" * 1000}] * 4_000
    assert len(render(engine, CHATML, messages=many)) > 4_000_000


@pytest.mark.parametrize("engine", [MiniJinjaEngine, Jinja2Engine])
def test_an_engine_renders_many_times(engine):
    made = engine(CHATML)
    assert len({made.render(freeze(VARIABLES)) for _ in range(50)}) == 1


def test_jinja2_takes_over_what_minijinja_does_not_bound():
    source = "{{ '{}:{:>4}'.format(1, 2) }}"
    assert isinstance(make_engine(source), Jinja2Engine)
    assert make_engine(source).render({}) == "1:   2"
    with pytest.raises(TemplateError, match=r"str\.format"):
        MiniJinjaEngine(source)


def test_jinja2_takes_over_where_minijinja_is_absent(monkeypatch):
    assert isinstance(make_engine("x"), MiniJinjaEngine)
    monkeypatch.setattr(template_engines.importlib.util, "find_spec", lambda name: None)
    assert isinstance(make_engine("x"), Jinja2Engine)
