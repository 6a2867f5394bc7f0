"""Chat templates: short ones of each kind, and real families' with their exact text for tools."""

LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
    "+ m['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
BYTES_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m['role'] + '>' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<eot>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<eot>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)

HARMONY_TEMPLATE = r"""{{- '<|start|>system<|message|>Knowledge cutoff: 2024-06\nReasoning: medium<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\n' }}
    {%- for tool in tools %}
        {{- '// ' + (tool.function.description or '') + '\ntype ' + tool.function.name + ' = (_: {\n' }}
        {%- set parameters = tool.function.parameters or {'properties': {}} %}
        {%- for name, schema in parameters.properties | items %}
            {%- if schema.description %}{{- '// ' + schema.description + '\n' }}{%- endif %}
            {{- name + ('' if name in (parameters.required or []) else '?') + ': ' + schema.type + ',\n' }}
        {%- endfor %}
        {{- '}) => any;\n' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last_call = namespace(name=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- if m.content %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {%- set last_call.name = call.name %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.' + last_call.name + ' to=assistant<|channel|>commentary' }}
        {{- '<|message|>' + m.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant' }}
{%- endif %}
"""
"""A short form of gpt-oss's template.

The last answer ends differently from earlier ones, and the generation prompt stops before the
channel. A tool's result repeats the tool's name.
"""

LLAMA31_TEMPLATE = r"""{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools is not none %}
    {%- set first_user_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' -}}
    {{- "Given the following functions, please respond with a JSON for a function call " }}
    {{- "with its proper arguments that best answers the given prompt.\n\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

LLAMA32_DATE = """{%- if strftime_now is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
"""
"""The lines of Llama-3.2 that ask for the current date. Here they ignore a date that is passed."""

_QWEN_TOOLS = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nReturn a json object within <tool_call></tool_call> XML tags.<|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
"""
_QWEN_CALLS = r"""        {%- for tool_call in message.tool_calls %}
            {%- if (loop.first and content) or (not loop.first) or always_newline %}
                {{- '\n' }}
            {%- endif %}
            {%- if tool_call.function %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
"""
_QWEN_RESULTS = r"""    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
QWEN25_TEMPLATE = (
    _QWEN_TOOLS
    + r"""{%- set always_newline = true %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- set content = message.content %}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
"""  # noqa: E501
    + _QWEN_CALLS
    + _QWEN_RESULTS
)
QWEN3_TEMPLATE = (
    _QWEN_TOOLS
    + r"""{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
"""  # noqa: E501
    + _QWEN_CALLS
    + _QWEN_RESULTS
)

# Short forms of other families' templates, each with its peculiarities.

GEMMA_TEMPLATE = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim }}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA4_TEMPLATE = r"""{{- bos_token }}
{%- set last = namespace(calls=none) %}
{%- for m in messages %}
    {%- set before = messages[loop.index0 - 1].role if loop.index0 else '' %}
    {%- set after = messages[loop.index0 + 1].role if not loop.last else '' %}
    {%- if m.role == 'tool' %}
        {%- if last.calls %}
            {{- '<|tool_response>response{' + m.content + '}<tool_response|>' }}
        {%- endif %}
    {%- else %}
        {%- if before != 'tool' %}
            {{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
        {%- endif %}
        {%- set last.calls = m.tool_calls %}
        {%- for call in m.tool_calls or [] %}
            {{- '<|tool_call>call:' + call.function.name }}
            {{- call.function.arguments | tojson + '<tool_call|>' }}
        {%- endfor %}
        {{- (m.content or '') | trim }}
        {%- if m.tool_calls and not after %}
            {{- '<|tool_response>' }}
        {%- elif after != 'tool' %}
            {{- '<turn|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}
    {{- '<|turn>model\n<|channel>thought\n<channel|>' }}
{%- endif %}"""
"""The generation prompt has an empty thought, which the rendering of a chat does not have.

Results are shown only after a message that calls a tool.
"""

LLAMA2_TEMPLATE = (
    "{% set system = messages[0].content if messages[0].role == 'system' else false %}"
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' }}"
    "{% if loop.first and system %}{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{% endif %}"
    "{{ m.content | trim + ' [/INST]' }}{% else %}"
    "{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
"""Each turn starts with a BOS, and the system message is part of the first turn."""

ZEPHYR_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""The template writes no BOS, even if the tokenizer puts one before plain text."""

MISTRAL3_TEMPLATE = r"""{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.first %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST] ' }}
        {%- if loop.last and system is defined %}{{- system + '\n\n' }}{%- endif %}
        {{- m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be strings with length 9') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content | string + '}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
"""The system message goes into the user's last turn, if the chat ends with a user's turn."""

ALTERNATING_TEMPLATE = r"""{{- bos_token }}
{%- set turns = namespace(n=0) %}
{%- for m in messages if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
    {%- if (m.role == 'user') != (turns.n % 2 == 0) %}
        {{- raise_exception('Questions and answers must alternate') }}
    {%- endif %}
    {%- set turns.n = turns.n + 1 %}
{%- endfor %}
{%- set questions = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and m == questions[-1] %}{{- '[TOOLS]' + tools | tojson + '[/TOOLS]' }}{%- endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {%- for call in m.tool_calls %}
            {{- '[CALL]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content + eos_token }}
    {%- else %}
        {{- '[RESULT]' + m.content + '[/RESULT]' }}
    {%- endif %}
{%- endfor %}
"""
"""Like Mistral's newer templates: an answer has no header, and there is no generation prompt.

Tools stand before the last question, and only messages that call tools may stand between a question
and its answer.
"""

DEEPSEEK_TEMPLATE = r"""{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|User|>' + m.content }}{%- endif %}
    {%- if m.role == 'system' %}{{- m.content }}{%- endif %}
    {%- if m.role == 'assistant' %}
        {{- '<|Assistant|>' + m.content.split('</think>')[-1] }}
        {%- for call in m.tool_calls or [] %}
            {{- '<|call|>' + call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}
        {%- endfor %}
        {{- '<|end_of_sentence|>' }}
    {%- endif %}
    {%- if m.role == 'tool' %}{{- '<|output|>' + m.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|>' }}{%- endif %}
"""
"""Arguments of calls are strings, and reasoning is cut off."""

EITHER_TEMPLATE = r"""{{- bos_token }}
{%- for m in messages %}
    {{- '<start_of_turn>' + m.role + '\n' }}
    {%- if m.content is string %}
        {{- m.content | trim }}
    {%- else %}
        {%- for part in m.content %}
            {%- if part.type == 'image' %}{{- '<image>' }}{%- else %}{{- part.text | trim }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>assistant\n' }}{%- endif %}
"""
"""Contents are strings or lists of parts, as in Gemma 3's template."""

PARTS_TEMPLATE = r"""{%- for m in messages %}
    {{- m.role | capitalize + ':' }}
    {%- for part in m.content if part.type == 'text' %}{{- ' ' + part.text }}{%- endfor %}
    {{- '<end_of_utterance>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}
"""
"""Contents are always lists of parts, as in SmolVLM's template."""

PHI4_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and 'tools' in m and m.tools is not none %}"
    "{{ '<|system|>' + m.content + '<|tool|>' + m.tools + '<|/tool|><|end|>' }}"
    "{% else %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The tools are a string in the system message."""

CODER_TEMPLATE = r"""{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' + m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
        {%- for name, value in call.function.arguments | items %}
            {{- '<parameter=' + name + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
        {%- endfor %}
        {{- '</function>\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""Arguments of calls are written in tags, as in Qwen3-Coder's template."""

HERMES_TEMPLATE = r"""{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}
    {{- messages[0].content }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- if tools %}
    {{- '\nHere are the available tools: <tools> ' }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- '{"type": "function", "function": {"name": "' + tool.name + '", "description": "' + tool.name + '(' }}
        {%- for name, schema in tool.parameters.properties | items %}
            {{- name + ': ' + schema.type + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ') - ' + tool.description + '\n\n    Args:\n' }}
        {%- for name, schema in tool.parameters.properties | items %}
            {{- '        ' + name + '(' + schema.type + '): ' + schema.description | trim }}
        {%- endfor %}
        {{- '", "parameters": ' + tool.parameters | tojson + '}}\n' }}
    {%- endfor %}
    {{- ' </tools>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content is defined and message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {{- '\n<tool_call>\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>tool\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""Hermes 2 Pro's template. It describes a tool in words, and then by its schema."""

COMMAND_TEMPLATE = r"""{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start|>system\n' + (system or 'You answer questions.') }}
{%- if tools %}
    {{- '\n\n## Available Tools\n' }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- '```python\ndef ' + tool.name + '(' }}
        {%- for name, schema in tool.parameters.properties | items %}
            {{- name + ': ' + ('str' if schema.type == 'string' else 'float') }}
            {{- ('' if name in tool.parameters.required else ' = None') + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ') -> List[Dict]:\n    \"\"\"' + tool.description + '\n\n    Args:\n' }}
        {%- for name, schema in tool.parameters.properties | items %}
            {{- '        ' + name + ': ' + schema.description + '\n' }}
        {%- endfor %}
        {{- '    \"\"\"\n    pass\n```\n' }}
    {%- endfor %}
{%- endif %}
{{- '<|end|>' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|start|>chatbot\n' + (message.content or '') + 'Action: ```json\n[' }}
        {%- for call in message.tool_calls %}
            {{- '{"tool_name": ' + call.function.name | tojson + ', "parameters": ' }}
            {{- call.function.arguments | tojson(indent=4) + '}' + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']```<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>system\n<results>\nDocument: ' + loop.index0 | string + '\n' }}
        {{- message.content + '</results><|end|>' }}
    {%- else %}
        {{- '<|start|>' + ('chatbot' if message.role == 'assistant' else message.role) + '\n' }}
        {{- message.content | trim + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>chatbot\n' }}{%- endif %}
"""
"""Command R's template. A tool is a Python function, and its types have other names than in the schema."""

SORTED_TEMPLATE = r"""{%- macro show(value) -%}
    {%- if value is string %}{{- '<escape>' + value + '<escape>' }}
    {%- elif value is boolean %}{{- 'true' if value else 'false' }}
    {%- elif value is mapping %}
        {{- '{' }}
        {%- for key, item in value | dictsort %}{{- key + ':' + show(item) + ('' if loop.last else ',') }}{%- endfor %}
        {{- '}' }}
    {%- elif value is sequence %}
        {{- '[' }}
        {%- for item in value %}{{- show(item) + ('' if loop.last else ',') }}{%- endfor %}
        {{- ']' }}
    {%- else %}{{- value }}{%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- if tools or messages[0].role == 'system' %}
    {{- '<start_of_turn>developer\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{%- endif %}
    {%- for tool in tools or [] %}
        {{- 'declaration:' + tool.function.name + '{description:' + show(tool.function.description) }}
        {{- ',parameters:{properties:{' }}
        {%- for name, schema in tool.function.parameters.properties | dictsort %}
            {{- name + ':{description:' + show(schema.description) + ',type:' + schema.type | upper + '}' }}
        {%- endfor %}
        {{- '}}}' }}
    {%- endfor %}
    {{- '<end_of_turn>\n' }}
{%- endif %}
{%- for m in messages if m.role != 'system' %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
    {%- if m.content %}{{- m.content | trim }}{%- endif %}
    {%- for call in m.tool_calls or [] %}
        {{- 'call:' + call.function.name + show(dict(call.function.arguments)) }}
    {%- endfor %}
    {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}
"""
"""FunctionGemma's template. Keys are sorted, and each type of value has its own form."""
