"""Chat templates in the shapes that published models have, over the tests' own control tokens."""

from __future__ import annotations

from tests.engine.tiny_tokenizer import KIMI_TEMPLATE

CHATML = """\
{% for message in messages %}<|im_user|>{{ message.role }}
{{ message.content | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant
{% endif %}"""
"""Trims white space; the header ends with a line break."""

RAW_CHATML = """\
{%- for message in messages -%}
  {{ '<|im_user|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
  {%- for call in message.tool_calls or [] -%}
    {{ '\\n<tool_call>\\n' + call.function | tojson + '\\n' }}
  {%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_user|>assistant\\n' }}{%- endif -%}"""
"""Keeps white space: an answer that starts with a line break merges with the header's."""

HEADERS = """\
{{- '[BOS]' -}}
{%- if messages[0].role == 'system' -%}
  {%- set instructions = messages[0].content | trim -%}{%- set rest = messages[1:] -%}
{%- else -%}
  {%- set instructions = '' -%}{%- set rest = messages -%}
{%- endif -%}
{{- '<|im_system|>system<|im_middle|>\\n\\nCutting Knowledge Date: December 2023\\nToday Date: ' -}}
{{- (date_string or strftime_now('%d %b %Y')) + '\\n\\n' + instructions + '<|im_end|>' -}}
{%- for message in rest -%}
  {{- '<|im_user|>' + message.role + '<|im_middle|>\\n\\n' -}}
  {%- if tools and loop.first and message.role == 'user' -%}
    {{- 'Given the following functions, answer with JSON.\\n\\n' -}}
    {%- for tool in tools -%}{{- tool | tojson(indent=4) + '\\n\\n' -}}{%- endfor -%}
  {%- endif -%}
  {%- for call in message.tool_calls or [] -%}
    {{- {'name': call.function.name, 'parameters': call.function.arguments} | tojson -}}
  {%- endfor -%}
  {{- message.content | trim + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_user|>assistant<|im_middle|>\\n\\n' -}}{%- endif -%}"""
"""Header tokens around the role, a date in the system block, tools in the first user message."""

THINKING = """\
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if messages[0].role == 'system' -%}<|im_system|>{{ messages[0].content }}{%- endif -%}
{%- if tools -%}
  {%- for tool in tools %}{{ tool | tojson }}{% endfor -%}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}<|im_user|>{{ message.content }}<|im_end|>
  {%- elif message.role == 'tool' -%}<|im_user|>result: {{ message.content }}<|im_end|>
  {%- elif message.role == 'assistant' -%}
    {%- set content = message.content.split('</think>')[-1] if loop.index0 < ns.last else message.content -%}
    <|im_assistant|>{{ content }}
    {%- for call in message.tool_calls or [] -%}<tool_call>{{ call.function | tojson }}{%- endfor -%}
    <|im_end|>
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|><think>{%- endif -%}"""
"""Drops thoughts of answers before the last user turn; opens a thought for the model."""

REASONING = """\
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
  {{- '<|im_system|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') -}}
  {{- '# Tools\\n\\n<tools>' -}}
  {%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
  {{- '\\n</tools><|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
  {{- '<|im_system|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
    {{- '<|im_user|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
  {%- elif message.role == 'assistant' -%}
    {%- set thought = message.reasoning_content or '' -%}
    {%- set said = message.content -%}
    {%- if not thought and '</think>' in said -%}
      {%- set thought = said.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
      {%- set said = said.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{- '<|im_assistant|>assistant\\n' -}}
    {%- if loop.index0 > ns.last and (loop.last or thought) -%}
      {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + said.lstrip('\\n') -}}
    {%- else -%}
      {{- said -}}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      {{- '\\n' if (loop.first and said) or not loop.first -}}
      {{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- elif message.role == 'tool' -%}
    {{- '<|im_user|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' -}}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
    {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_assistant|>assistant\\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}
    {{- '<think>\\n\\n</think>\\n\\n' -}}
  {%- endif -%}
{%- endif -%}"""
"""Thoughts in a field of their own, kept behind the last user turn only; results of tools are user turns."""

OPENED = """\
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {{- '<|im_assistant|>assistant\\n' + message.content.split('</think>')[-1] + '<|im_end|>\\n' -}}
  {%- else -%}
    {{- '<|im_user|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant\\n<think>\\n' -}}{%- endif -%}"""
"""Opens a thought that no history has, behind a line break that merges with an answer's own."""

TOOLS_LAST = """\
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- '[BOS]' -}}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {%- if tools and loop.index0 == ns.last -%}
      {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}
    {%- endif -%}
    {{- '<|im_user|> ' + message.content + '<|im_end|>' -}}
  {%- elif message.role == 'tool' -%}
    {{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' -}}
  {%- elif message.role == 'assistant' -%}
    {{- ' ' + message.content -}}
    {%- for call in message.tool_calls or [] -%}{{- '[TOOL_CALLS] ' + call.function | tojson -}}{%- endfor -%}
    {{- '[EOS]' -}}
  {%- else -%}
    {{- '<|im_system|> ' + message.content + '\\n\\n' -}}
  {%- endif -%}
{%- endfor -%}"""
"""Declares tools before the last user message, so that they move; a space stands before every text."""

STRICT = """\
{%- for message in messages -%}
  {%- if message.role not in ('user', 'assistant') -%}
    {{ raise_exception('only user and assistant are known') }}
  {%- endif -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{ raise_exception('roles must alternate user/assistant') }}
  {%- endif -%}
  <|im_user|>{{ message.content }}<|im_end|>
{%- endfor -%}"""
"""Refuses unknown roles and conversations that do not alternate."""

FOLDED = """\
{{- '[BOS]' -}}
{%- if messages[0].role == 'system' -%}
  {%- set folded = messages[0].content + '\\n\\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}
  {%- set folded = '' -%}{%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('Conversation roles must alternate user/assistant') -}}
  {%- endif -%}
  {{- '<|im_user|>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
  {{- (folded if loop.first else '') + message.content | trim + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_user|>model\\n' -}}{%- endif -%}"""
"""No system role: its text stands at the start of the first user message; the assistant is `model`."""

DATED_END = """\
{%- for message in messages -%}
  {{- '<|im_user|>' + message.role + ': ' + message.content + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_system|>It is ' + strftime_now('%Y-%m-%d') + ', effort ' + (effort or 'low') + '.<|im_end|>' -}}
  {{- '<|im_user|>assistant: ' -}}
{%- endif -%}"""
"""A reminder behind the last message that no later prompt has; the header ends with a space."""

REVERSED = (
    """{%- for message in messages | reverse -%}<|im_user|>{{ message.content }}<|im_end|>{%- endfor -%}"""
)
"""The newest message comes first: nothing but the very start is ever shared."""

COUNTED = """\
{{- '<|im_system|>' + messages | length | string + ' messages<|im_end|>' -}}
{%- for message in messages -%}{{- '<|im_user|>' + message.content + '<|im_end|>' -}}{%- endfor -%}"""
"""Says first how long the conversation is."""

SHAPES = {
    "kimi": KIMI_TEMPLATE,
    "chatml": CHATML,
    "raw_chatml": RAW_CHATML,
    "headers": HEADERS,
    "thinking": THINKING,
    "reasoning": REASONING,
    "opened": OPENED,
    "tools_last": TOOLS_LAST,
    "strict": STRICT,
    "folded": FOLDED,
    "dated_end": DATED_END,
    "reversed": REVERSED,
    "counted": COUNTED,
}

ELEMENTS = """\
{%- if tools -%}
  {{- '<|im_system|>system\\n# Tools\\n\\n<tools>' -}}
  {%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
  {{- '\\n</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {{- '<|im_assistant|>assistant\\n<think>\\n' + (message.reasoning_content or '') | trim -}}
    {{- '\\n</think>\\n\\n' + message.content | trim -}}
    {%- for call in message.tool_calls or [] -%}
      {{- '\\n\\n' if loop.first and message.content | trim else ('' if loop.first else '\\n') -}}
      {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
      {%- for key, value in call.function.arguments.items() -%}
        {{- '<parameter=' + key + '>\\n' -}}
        {{- value if value is string else value | tojson -}}
        {{- '\\n</parameter>\\n' -}}
      {%- endfor -%}
      {{- '</function>\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- elif message.role == 'tool' -%}
    {{- '<|im_user|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
  {%- else -%}
    {{- '<|im_user|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant\\n<think>\\n' -}}{%- endif -%}"""
"""Arguments of tools in elements of their own; thoughts of all answers are kept, and opened for the model."""
