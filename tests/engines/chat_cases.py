"""Chat templates for tests, in the forms that model makers write; the recorder uses them too."""

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

TEMPLATES = {
    # ChatML with a default system message, tools in front, thinking switched at the end.
    "chatml": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>' + message.reasoning_content + '</think>' }}
        {%- endif %}
        {% generation %}
        {{- content }}
        {% endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    # Everything that a template can see.
    "dump": "{{ bos_token }}{{ messages | tojson }}|{{ tools | tojson(indent=1) }}"
    "|{{ documents | tojson }}|{{ add_generation_prompt }}|{{ enable_thinking }}"
    "|{{ reasoning_effort }}|{{ extra }}|{{ unk_token }}|{{ eos_token }}",
    # Content as a list of parts, with a loop control.
    "parts": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type != 'text' %}{% continue %}{% endif %}{{ part.text }};{% endfor %}{% endif %}"
    "{{ m | tojson }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    # The loop over parts hides in a macro.
    "macro": "{% macro show(value) %}{% for part in value %}({{ part.text }}){% endfor %}"
    "{% endmacro %}{% set rest = messages[1:] %}{% for m in rest %}{{ m.role }}"
    "{{ show(m['content']) }}{% endfor %}",
    # Strips, refuses, knows developers.
    "strict": "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' and not m.tool_call_id %}{{ raise_exception('no id') }}{% endif %}"
    "{% if m.role == 'developer' %}<dev>{% endif %}"
    "<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
}
