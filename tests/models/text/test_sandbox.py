"""Operations of chat templates that would take much memory are refused, and all others do what Jinja does."""

import time

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.models.text.template import ChatTemplate
from baton.models.text.tokenizer import TemplateError

LARGE = [
    "{{ '%1000000000d' | format(1) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%.1000000000f' % 1.5 }}",
    "{{ '%(a)1000000000d' % {'a': 1} }}",
    "{{ '%s%s' % (long, long) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 1000000000) }}",
    "{{ '{x:>1000000000}'.format_map({'x': 1}) }}",
    "{{ '{0}{0}'.format(long) }}",
    "{{ 'x'.ljust(1000000000) }}",
    "{{ 'x'.rjust(1000000000) }}",
    "{{ 'x'.center(1000000000) }}",
    "{{ '1'.zfill(1000000000) }}",
    "{{ 'a\tb'.expandtabs(1000000000) }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ ['x'] | map('center', 1000000000) | list }}",
    "{{ 'x' | indent(1000000000) }}",
    "{{ [1] | tojson(indent=1000000000) }}",
    "{{ [1] | batch(1000000000, 0) | list }}",
    "{{ 1 | round(1000000000, 'floor') }}",
    "{{ long.replace('x', long) }}",
    "{{ long | replace(new=long, old='x') }}",
    "{{ ('x ' * 10000) | wordwrap(1, true, 'y' * 10000) }}",
    "{{ [[1], [2]] | sum(start=[]) }}",
    "{% set ns = namespace(x=3) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ long | replace('x', long) }}",
    "{{ long.join(['a'] * 60000) }}",
    "{{ ''.join([long, long]) }}",
    "{{ (['a'] * 60000) | join(long) }}",
    "{% set ns = namespace(x=long) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=long) %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set x %}{{ long }}{{ long }}{% endset %}",
    "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice(long) }}",
    "{% for i in range(100000) %}{{ long }}{% endfor %}",
]
COMMON = [
    "{{ '%s: %05d, %5.2f %%' % ('a', 3, 1.5) }}",
    '{{ \'{"name": "%s", "arguments": {"x": %s}}\' | format(\'a\', \'{}\') }}',
    "{{ '{}: {:>5}, {a:02d}'.format('a', 1700000000, a=5) }}",
    "{{ '%d%% * bold' % 5 }}{{ '%s%% 20240726' | format(5) }}{{ '%s\n%%\n* item %s' % ('a', 'b') }}",
    "{{ ('x' * 20000 ~ '{}').format('tools') }}{{ '{' * 0 ~ '%s' | format('{' * 20000) }}",
    "{{ [1, 2.5] | sum }}{{ [{'x': 1}] | sum(attribute='x') }}{{ 12345678901 * 98765432109 }}",
    "{{ ['a', 'b'] | join(', ') }}{{ [{'x': 1}, {'x': 2}] | join(attribute='x') }}{{ 'abc' | join('-') }}",
    "{{ ', '.join(['a', 'b']) }}{{ '-'.join('abc') }}",
    "{{ 'a\nb' | indent(4) }}{{ 'a\nb' | indent(width=2, first=true) }}",
    "{{ 'a' ~ 1 ~ none ~ missing }}",
    "{{ 'xx'.replace('x', 'yy') }}{{ 'xx' | replace('x', 'y', 1) }}",
    "{{ 1 + 2 }}{{ 'a' + 'b' }}{{ [1] + [2] }}{{ 5 % 3 }}",
    "{{ [1, 2, 3] | batch(2, 0) | list }}{{ 3.14159 | round(2) }}{{ 'x' | center(5) }}{{ 'x'.ljust(3) }}|",
    "{{ missing | default(1700000000) }}{{ '1700000000' | int }}",
]


@pytest.mark.parametrize("source", LARGE)
def test_large_values_are_refused_before_they_are_made(source: str) -> None:
    long = "{% set long = 'x' * 60000000 %}" if "long" in source else ""
    template = ChatTemplate({"default": long + source}, {})
    began = time.monotonic()
    with pytest.raises(TemplateError, match="too large"):
        template.render([], add_generation_prompt=True)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("name", ["encode", "translate"])
def test_methods_that_no_template_needs_are_refused(name: str) -> None:
    template = ChatTemplate({"default": f"{{{{ 'x'.{name}() }}}}"}, {})
    with pytest.raises(TemplateError, match=f"attribute '{name}' of 'str' object is unsafe"):
        template.render([], add_generation_prompt=True)


@pytest.mark.parametrize("source", COMMON)
def test_operations_of_common_templates_give_what_jinja_gives(source: str) -> None:
    expected = ImmutableSandboxedEnvironment().from_string(source).render()
    assert ChatTemplate({"default": source}, {}).render([], add_generation_prompt=True) == expected


def test_an_integer_that_python_does_not_read_is_no_template() -> None:
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate({"default": "{{ " + "9" * 5000 + " }}"}, {})
