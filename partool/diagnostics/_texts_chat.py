"""Rules about chat templates (6xx), checked when conversations become tokens; the examples are for reading."""

from __future__ import annotations

from partool.diagnostics.record import Rule, command_rule

RULES: tuple[Rule, ...] = (
    command_rule(
        "PT606",
        "The chat template cannot be used",
        "Conversations become text by the Jinja template of the tokenizer's folder or by a file that you name. It has "
        "to be there and to compile, and jinja2 has to be 3.1.6 or later: older versions do not confine templates.",
        "{% for message in messages %}{{ message.content }}",
        "{% for message in messages %}{{ message.content }}{% endfor %}",
    ),
    command_rule(
        "PT607",
        "The chat template refuses a conversation",
        "Templates raise errors of their own, often about the order of roles; the message names the file, the line and "
        "the number of the message.",
        '{"messages": [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Hi"}]}',
        '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}',
    ),
    command_rule(
        "PT608",
        "The tokens that the assistant writes cannot be told from the chat template",
        "A template without {% generation %} marks is rendered up to each message; that text has to begin the text of "
        "the conversation, and the generation prompt has to be the message's header. Templates that drop the "
        "reasoning of earlier messages, or prompt with <think>, need marks.",
        "{{ '<|assistant|>' + (message.reasoning if loop.last else '') + message.content + '<|end|>' }}",
        "{{ '<|assistant|>' }}{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}",
    ),
)
