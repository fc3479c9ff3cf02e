"""Captured conversations as segments: which tokens, in which segment, and which of them are trained.

`parts()` shows each segment as context, sampled, context, sampled, ... in the tags and characters of tests/chats.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from schemas.chat import ChatError, ParsedTurn, ToolCall
from schemas.errors import MoltflowError
from schemas.recipe import SamplingConfig
from stages.agents.rendering import ChatRenderer
from stages.capture.writing import assistant_message
from tests.chats import (
    CALLS,
    CLOSING,
    DROPS_THOUGHTS,
    KEEPS_THOUGHTS,
    OPENING,
    PLAIN,
    TRIMS,
    Chat,
    call,
    generation,
    tool,
    user,
)

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def opened(chat: Chat) -> list[str]:
    return [segment.opened for segment in chat.session.segments()]


# ---- exact tokens ----


def test_a_conversation_is_one_segment_of_prompt_sampled_and_delta_in_turn() -> None:
    chat = Chat(TRIMS)  # strips a space after </think>, so its render of an answer is not what was sampled
    messages = chat.ask([user("hi")], "<think>1</think> A<e>")
    messages = chat.ask([*messages, user("go")], "<think>2</think> B<e>")
    chat.ask([*messages, user("on")], "C<e>")
    (segment,) = chat.session.segments()
    whole = "<u>hi<e><a>" + "<think>1</think> A<e>" + "<u>go<e><a>" + "<think>2</think> B<e>" + "<u>on<e><a>" + "C<e>"
    assert segment.token_ids == chat.ids(whole)
    # 5 prompt, 18 + 2 sampled (a token each character), 5 delta, ...
    assert [(s["start"], s["end"], s["turn"]) for s in segment.spans] == [(5, 24, 0), (29, 48, 1), (53, 55, 2)]
    sampled = [-(i + 1) / 8 for i in range(19)]
    assert segment.logprobs == [0] * 5 + sampled + [0] * 5 + sampled + [0] * 5 + [-1 / 8, -2 / 8]
    assert [turn["finish_reason"] for turn in segment.turns] == ["stop"] * 3
    assert [message["role"] for message in segment.messages] == ["user", "assistant"] * 3


def test_ids_that_the_tokenizer_would_not_give_for_their_text_stay_as_sampled() -> None:
    chat = Chat(merges=(("a", "b"), ("b", "c")))
    a, c, ab, bc = (chat.renderer.tokenizer.convert_tokens_to_ids(token) for token in ("a", "c", "ab", "bc"))
    assert chat.ids("abc") == [ab, c]
    end = chat.ids("<e>")
    messages = chat.ask([user("x")], [a, bc, *end])
    assert messages[-1]["content"] == "abc"
    chat.ask([*messages, user("abc")], [ab, c, *end])
    (segment,) = chat.session.segments()
    user_tag, answer = chat.ids("<u>"), chat.ids("<a>")
    first = [*user_tag, *chat.ids("x"), *end, *answer, a, bc, *end]
    assert segment.token_ids == [*first, *user_tag, ab, c, *end, *answer, ab, c, *end]


def test_what_the_engine_is_given_is_what_is_stored_before_the_turn() -> None:
    chat = Chat()
    half = chat.ids("é")[:1]  # no character: decoding loses it
    messages = chat.ask([user("x")], [*half, *chat.ids("<x>A<e>")])
    turn = chat.session.begin([*messages, user("y")])
    assert turn.token_ids == [*chat.ids("<u>x<e><a>"), *half, *chat.ids("<x>A<e>"), *chat.ids("<u>y<e><a>")]
    chat.commit(turn, "B<e>")
    assert chat.session.segments()[0].token_ids == turn.token_ids + chat.ids("B<e>")


def test_a_special_token_inside_a_turn_shifts_nothing() -> None:
    chat = Chat()
    messages = chat.ask([user("x")], "A<x>B<x><e>")  # the client sees AB
    assert messages[-1]["content"] == "AB"
    chat.ask([*messages, user("y")], "C<e>")
    assert chat.parts() == [["<u>x<e><a>", "A<x>B<x><e>", "<u>y<e><a>", "C<e>"]]


def test_a_special_token_that_starts_every_render_stands_there_once() -> None:
    chat = Chat("<x>" + PLAIN)
    chat.ask([*chat.ask([user("x")], "<x>A<e>"), user("y")], "B<e>")
    assert chat.parts() == [["<x><u>x<e><a>", "<x>A<e>", "<u>y<e><a>", "B<e>"]]


@pytest.mark.parametrize(("sampled", "delta"), [("A<e>", "<u>y<e><a>"), ("A", "<e><u>y<e><a>")])
def test_the_end_of_a_turn_stands_there_once(sampled: str, delta: str) -> None:
    chat = Chat()
    chat.ask([*chat.ask([user("x")], sampled), user("y")], "B<e>")
    assert chat.parts() == [["<u>x<e><a>", sampled, delta, "B<e>"]]


def test_what_a_template_puts_before_the_end_is_left_out_when_the_end_was_sampled() -> None:
    chat = Chat(PLAIN.replace("<e>{% endfor", "{{ '\n' }}<e>{{ '\n' }}{% endfor"))
    messages = chat.ask([user("x")], "A<e>")
    chat.ask([*messages, user("<e>")], "B")  # a user who says the end of a turn changes nothing
    chat.ask([*messages, user("<e>"), {"role": "assistant", "content": "B"}, user("z")], "C<e>")
    first, second = "<u>x\n<e>\n<a>", "\n<u><e>\n<e>\n<a>"
    assert chat.parts() == [[first, "A<e>", second, "B", "\n<e>\n<u>z\n<e>\n<a>", "C<e>"]]


def test_a_cut_off_turn_that_ends_as_the_delta_begins_keeps_both() -> None:
    chat = Chat(PLAIN.replace("<e>{% endfor", "!<e>{% endfor"))
    chat.ask([*chat.ask([user("x")], "A!"), user("y")], "B<e>")
    assert chat.parts() == [["<u>x!<e><a>", "A!", "!<e><u>y!<e><a>", "B<e>"]]


def test_spans_follow_the_prompt_that_template_arguments_make() -> None:
    template = "{{ model_identity }}" + PLAIN
    for identity in ("I", "I am a model"):
        chat = Chat(template, model_identity=identity)
        chat.ask([*chat.ask([user("x")], "A<e>"), user("y")], "B<e>")
        assert chat.parts() == [[f"{identity}<u>x<e><a>", "A<e>", "<u>y<e><a>", "B<e>"]]


def test_a_turn_that_a_refit_crossed_has_a_span_for_each_version() -> None:
    chat = Chat()
    crossed = replace(generation(chat.ids("AB<e>")), versions=((2, 0, 1), (3, 1, 3)))
    chat.session.commit(chat.session.begin([user("x")]), crossed, ParsedTurn("AB"), SamplingConfig(), 0.5)
    assert chat.session.segments()[0].spans == [
        {"start": 4, "end": 5, "turn": 0, "version": 2},
        {"start": 5, "end": 7, "turn": 0, "version": 3},
    ]


# ---- templates that rewrite history ----


def test_a_template_that_drops_earlier_reasoning_opens_a_segment_rendered_whole() -> None:
    chat = Chat(DROPS_THOUGHTS)
    messages = chat.ask([user("x")], "[deep]A<e>", ParsedTurn("A", reasoning="deep"))
    del messages[-1]["reasoning_content"]  # most clients do not send it back
    chat.ask([*messages, user("feedback")], "B<e>")
    assert chat.parts() == [["<u>x<e><a>", "[deep]A<e>"], ["<u>x<e><a>A<e><u>feedback<e><a>", "B<e>"]]
    assert opened(chat) == ["new", "rewritten"]


def test_reasoning_inside_the_text_that_a_template_drops_opens_a_segment_too() -> None:
    said = "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1] }}"
    chat = Chat(OPENING + said + CLOSING)
    chat.ask([*chat.ask([user("x")], "<think>deep</think>A<e>"), user("y")], "B<e>")
    assert chat.parts() == [["<u>x<e><a>", "<think>deep</think>A<e>"], ["<u>x<e><a>A<e><u>y<e><a>", "B<e>"]]


def test_reasoning_is_kept_while_tools_answer_and_dropped_at_the_next_question() -> None:
    chat = Chat(DROPS_THOUGHTS)
    calling = ParsedTurn("", "hm", (call("1", a=1),))
    messages = chat.ask([user("x")], '[hm]<c>add{"a":1}<e>', calling)
    messages = chat.ask([*messages, tool("1", "2")], "A<e>")
    assert len(chat.parts()) == 1
    chat.ask([*messages, user("y")], "B<e>")
    assert chat.parts() == [
        ["<u>x<e><a>", '[hm]<c>add{"a":1}<e>', "<t>2<e><a>", "A<e>"],
        ['<u>x<e><a><c>add{"a": 1}<e><t>2<e><a>A<e><u>y<e><a>', "B<e>"],
    ]


@pytest.mark.parametrize("echoed", [True, False])
def test_a_template_that_keeps_reasoning_extends_whether_or_not_the_client_sends_it_back(echoed: bool) -> None:
    chat = Chat(KEEPS_THOUGHTS)
    messages = chat.ask([user("x")], "[deep] A<e>", ParsedTurn("A", reasoning="deep"))
    if not echoed:
        del messages[-1]["reasoning_content"]
    chat.ask([*messages, user("y")], "B<e>")
    assert chat.parts() == [["<u>x<e><a>", "[deep] A<e>", "<u>y<e><a>", "B<e>"]]


def test_a_turn_cut_off_while_thinking_is_closed_by_the_template() -> None:
    chat = Chat(KEEPS_THOUGHTS)
    messages = chat.ask([user("x")], "[dee", ParsedTurn("", reasoning="dee"))
    chat.ask([*messages, user("y")], "B<e>")
    assert chat.parts() == [["<u>x<e><a>", "[dee", "]<e><u>y<e><a>", "B<e>"]]


def test_other_tools_are_another_history_and_the_old_ones_find_theirs_again() -> None:
    chat = Chat()
    messages = [*chat.ask([user("x")], "A<e>"), user("y")]
    chat.ask(messages, "B<e>", tools=TOOLS)
    chat.ask(messages, "C<e>")
    listed = '<s>[{"type": "function", "function": {"name": "add", "parameters": {}}}]<e>'
    assert chat.parts() == [
        ["<u>x<e><a>", "A<e>", "<u>y<e><a>", "C<e>"],
        [listed + "<u>x<e><a>A<e><u>y<e><a>", "B<e>"],
    ]
    assert opened(chat) == ["new", "rewritten"]


@pytest.mark.parametrize("said", ["", "{{ m.content | upper }}", "{{ m.content }} or {{ m.content }}"])
def test_a_template_that_drops_changes_or_repeats_what_was_said_opens_segments(said: str) -> None:
    shown = "{% if m.role == 'assistant' %}" + said + "{% else %}{{ m.content }}{% endif %}"
    chat = Chat(OPENING + shown + CLOSING + "{{ 'again:' + messages[1].content if messages | length > 1 }}")
    chat.ask([*chat.ask([user("x")], "a<e>"), user("y")], "b<e>")
    assert opened(chat) == ["new", "rewritten"] and chat.parts()[1][1] == "b<e>"


def test_a_tool_result_that_a_template_puts_before_the_text_of_its_turn_is_not_lost() -> None:
    # the result comes inside the turn of the call, the text behind it
    inside = "{% for n in messages[loop.index:] %}{% if n.role == 'tool' %}<t>{{ n.content }}{% endif %}{% endfor %}"
    body = (
        "{% if m.role != 'tool' %}<{{ m.role[0] }}>" + CALLS + inside + "{{ m.content }}<e>{% endif %}{% endfor %}<a>"
    )
    chat = Chat("{% for m in messages %}" + body.replace(inside, "{% if m.tool_calls %}" + inside + "{% endif %}"))
    messages = chat.ask([user("x")], "look<c>add{}<e>", ParsedTurn("look", tool_calls=(call("1"),)))
    chat.ask([*messages, tool("1", "result")], "B<e>")
    assert chat.parts()[1] == ["<u>x<e><a><c>add{}<t>resultlook<e><a>", "B<e>"]


# ---- tools ----


def test_parallel_calls_and_their_results_extend() -> None:
    chat = Chat()
    two = ParsedTurn("", tool_calls=(call("1", a=1), call("2", b="<e>")))
    sampled = '<c>add{ "a":1 }<c>add{"b":"e"}<e>'  # spelled in its own way
    messages = chat.ask([user("x")], sampled, two, TOOLS)
    chat.ask([*messages, tool("1", '"}<e>'), tool("2", "no")], "A<e>", tools=TOOLS)
    listed = '<s>[{"type": "function", "function": {"name": "add", "parameters": {}}}]<e>'
    assert chat.parts() == [[listed + "<u>x<e><a>", sampled, '<t>"}<e><e><t>no<e><a>', "A<e>"]]


def test_a_call_that_was_cut_off_gets_its_end_from_the_template() -> None:
    chat = Chat()
    messages = chat.ask([user("x")], "<c>add{}", ParsedTurn("", tool_calls=(call("1"),)))
    chat.ask([*messages, tool("1", "no")], "A<e>")
    assert chat.parts() == [["<u>x<e><a>", "<c>add{}", "<e><t>no<e><a>", "A<e>"]]


@pytest.mark.parametrize("calls", [(), (call("1"),)])
def test_another_token_that_ended_a_turn_is_not_looked_for_in_what_follows(calls: tuple[ToolCall, ...]) -> None:
    chat = Chat()
    sampled = "<c>add{}<x>" if calls else "A<x>"
    messages = chat.ask([user("x")], sampled, ParsedTurn("" if calls else "A", tool_calls=calls))
    answer = tool("1", "no<x>yes") if calls else user("no<x>yes")
    turn = chat.session.begin([*messages, answer])
    assert chat.decode(turn.token_ids) == f"<u>x<e><a>{sampled}<e><{answer['role'][0]}>no<x>yes<e><a>"


def test_a_template_that_takes_tool_messages_only_after_calls_extends() -> None:
    strict = (
        "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no') }}{% endif %}"
    )
    chat = Chat(PLAIN.replace("<{{ m.role[0] }}>", strict + "<{{ m.role[0] }}>"))
    messages = chat.ask([user("x")], "<c>add{}<e>", ParsedTurn("", tool_calls=(call("1"),)))
    chat.ask([*messages, tool("1", "2")], "A<e>")
    assert chat.parts() == [["<u>x<e><a>", "<c>add{}<e>", "<t>2<e><a>", "A<e>"]]


def test_calls_in_a_history_that_was_not_sampled_here_are_rendered() -> None:
    chat = Chat()
    said = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    history = [user("x"), {"role": "assistant", "content": "", "tool_calls": [said]}, tool("1", "2")]
    chat.ask(history, "A<e>")
    assert chat.parts() == [['<u>x<e><a><c>add{"a": 1}<e><t>2<e><a>', "A<e>"]]


@pytest.mark.parametrize("arguments", ['{"a": 1', "[1,2]", '"x"', "null"])
@pytest.mark.parametrize("items", [True, False])
def test_malformed_arguments_are_answered_like_any_call(arguments: str, items: bool) -> None:
    listed = "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"  # fails on text
    chat = Chat(PLAIN.replace("{{ c.function.arguments | tojson }}", listed) if items else PLAIN)
    said = ParsedTurn("", tool_calls=(replace(call("1"), arguments=arguments),))
    messages = chat.ask([user("x")], "<c>add?<e>", said)
    turn = chat.session.begin([*messages, tool("1", "these are no arguments")])
    assert chat.decode(turn.token_ids) == "<u>x<e><a><c>add?<e><t>these are no arguments<e><a>"


def test_messages_that_no_template_can_render_are_the_clients_error_and_leave_no_trace() -> None:
    chat = Chat("{% if messages[-1].content == 'bad' %}{{ raise_exception('bad words') }}{% endif %}" + PLAIN)
    messages = chat.ask([user("x")], "A<e>")
    with pytest.raises(ChatError, match="cannot render these messages: bad words") as refused:
        chat.session.begin([*messages, user("bad")])
    assert (refused.value.status, refused.value.code) == (400, "invalid_request")
    chat.ask([*messages, user("good")], "B<e>")
    assert chat.parts() == [["<u>x<e><a>", "A<e>", "<u>good<e><a>", "B<e>"]]


def test_what_clients_change_in_an_echo_is_no_rewrite() -> None:
    chat = Chat()
    calling = ParsedTurn("Look: ", tool_calls=(call("1", a=1, b=2), call("2", a=3)))
    chat.ask([user("x")], 'Look: <c>add{"a":1,"b":2}<c>add{"a":3}<e>', calling)
    calls = [
        {"id": "one", "type": "function", "function": {"name": "add", "arguments": '{"b":2.0,"a":1}'}},
        {"id": "two", "type": "function", "function": {"name": "add", "arguments": '{ "a": 3 }'}},
    ]
    echo: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": " Look:", "tool_calls": calls, "id": "m1", "status": "done", "refusal": None},
        tool("one", "3"),
        tool("two", "4"),
    ]
    turn = chat.session.begin(echo)
    assert chat.decode(turn.token_ids).endswith('<c>add{"a":3}<e><t>3<e><t>4<e><a>')
    assert [message.get("tool_call_id") for message in turn.messages] == [None, None, "1", "2"]  # our ids
    assert turn.messages[1] == assistant_message(calling)


# ---- several conversations ----


def test_a_side_call_and_sub_agents_that_take_turns_keep_their_segments() -> None:
    chat = Chat()
    first, second = [user("a")], [user("b")]
    for number in "12":
        first = [*chat.ask(first, f"A{number}<e>"), user("x")]
        second = [*chat.ask(second, f"B{number}<e>"), user("y")]
    assert chat.parts() == [
        ["<u>a<e><a>", "A1<e>", "<u>x<e><a>", "A2<e>"],
        ["<u>b<e><a>", "B1<e>", "<u>y<e><a>", "B2<e>"],
    ]


def test_a_re_ask_is_a_branch_whose_inherited_tokens_are_context() -> None:
    chat = Chat()
    messages = [*chat.ask([user("x")], "A<e>"), user("y")]
    once = chat.ask(messages, "B<e>")
    again = chat.ask(messages, "C<e>")
    chat.ask([*again, user("z")], "D<e>")
    chat.ask([*once, user("z")], "E<e>")
    assert chat.parts() == [
        ["<u>x<e><a>", "A<e>", "<u>y<e><a>", "B<e>", "<u>z<e><a>", "E<e>"],
        ["<u>x<e><a>A<e><u>y<e><a>", "C<e>", "<u>z<e><a>", "D<e>"],
    ]
    assert opened(chat) == ["new", "branch"]
    assert [len(segment.turns) for segment in chat.session.segments()] == [3, 2]


def test_samples_of_one_request_are_a_segment_each() -> None:
    chat = Chat()
    turn = chat.session.begin([user("x")])
    for sampled in ("A<e>", "A<e>", "B<e>"):
        chat.commit(turn, sampled)
    assert chat.parts() == [["<u>x<e><a>", "A<e>"], ["<u>x<e><a>", "A<e>"], ["<u>x<e><a>", "B<e>"]]


def test_of_two_turns_under_way_the_second_to_finish_is_the_branch() -> None:
    chat = Chat()
    messages = chat.ask([user("x")], "A<e>")
    one, two = chat.session.begin([*messages, user("1")]), chat.session.begin([*messages, user("2")])
    chat.commit(two, "C<e>")
    chat.commit(one, "B<e>")
    assert chat.parts() == [
        ["<u>x<e><a>", "A<e>", "<u>2<e><a>", "C<e>"],
        ["<u>x<e><a>A<e><u>1<e><a>", "B<e>"],
    ]


def test_equal_conversations_extend_the_one_not_yet_extended_then_the_newest() -> None:
    chat = Chat()
    messages = chat.ask([user("x")], "A<e>")
    assert messages == chat.ask([user("x")], "A<x><e>")  # the same to the client
    for sampled in ("1<e>", "2<e>", "3<e>"):
        chat.ask([*messages, user("y")], sampled)
    assert chat.parts() == [
        ["<u>x<e><a>", "A<e>", "<u>y<e><a>", "2<e>"],
        ["<u>x<e><a>", "A<x><e>", "<u>y<e><a>", "1<e>"],
        ["<u>x<e><a>A<x><e><u>y<e><a>", "3<e>"],
    ]


def test_a_compaction_opens_a_segment_and_goes_on_in_it() -> None:
    chat = Chat()
    chat.ask([*chat.ask([user("x")], "A<e>"), user("y")], "B<e>")
    compacted = chat.ask([user("so far: A, B")], "C<e>")
    chat.ask([*compacted, user("z")], "D<e>")
    assert chat.parts() == [
        ["<u>x<e><a>", "A<e>", "<u>y<e><a>", "B<e>"],
        ["<u>so far: A, B<e><a>", "C<e>", "<u>z<e><a>", "D<e>"],
    ]


def test_an_edited_history_branches_where_it_was_edited() -> None:
    chat = Chat()
    messages = chat.ask([*chat.ask([user("x")], "A<e>"), user("y")], "B<e>")
    edited = [*messages[:3], {"role": "assistant", "content": "edited"}, user("z")]
    chat.ask(edited, "C<e>")
    assert chat.parts()[1] == ["<u>x<e><a>A<e><u>y<e><a>edited<e><u>z<e><a>", "C<e>"]


# ---- failures and limits ----


def test_failed_generations_leave_no_trace() -> None:
    chat, plain = Chat(), Chat()
    for each in (chat, plain):
        messages = [user("x")]
        for sampled in ("A<e>", "B<e>"):
            turn = each.session.begin(messages)
            if each is chat:
                for broken in (
                    replace(generation([]), finish_reason="abort"),
                    replace(generation([1, 2]), error="engine died"),
                    replace(generation([1, 2]), versions=((0, 0, 1),)),
                    replace(generation([1, 2]), logprobs=[-1.0]),
                ):
                    with pytest.raises(MoltflowError):
                        each.session.commit(turn, broken, ParsedTurn("A"), SamplingConfig(), 0.5)
                turn = each.session.begin(messages)  # the client tries again
            messages = [*messages, each.commit(turn, sampled), user("y")]
    assert chat.parts() == plain.parts() == [["<u>x<e><a>", "A<e>", "<u>y<e><a>", "B<e>"]]
    assert opened(chat) == ["new"]


def test_a_turn_without_room_samples_nothing_and_what_did_not_fit_comes_again() -> None:
    chat = Chat(max_context_tokens=15)
    messages = chat.ask([user("x")], "A<e>")  # 4 + 2 tokens
    assert not chat.session.out_of_context
    long = [*messages, user("123456")]  # 9 more
    assert chat.session.count(long) == 15 and not chat.session.out_of_context
    turn = chat.session.begin(long)
    assert (len(turn.token_ids), turn.room) == (15, 0) and chat.session.out_of_context
    assert chat.parts() == [["<u>x<e><a>", "A<e>"]]
    after = chat.session.begin([*long, {"role": "assistant", "content": ""}, user("7")])
    assert chat.decode(after.token_ids) == "<u>x<e><a>A<e><u>123456<e><a><e><u>7<e><a>" and after.room == 0
    smaller = chat.session.begin([user("12")])
    assert smaller.room == 10  # a compaction has room again


def test_the_last_token_of_the_context_truncates_the_rollout() -> None:
    chat = Chat(max_context_tokens=6)
    turn = chat.session.begin([user("x")])
    assert turn.room == 2
    chat.commit(turn, "AB")
    assert chat.session.out_of_context


def test_a_history_that_ends_with_the_assistant_asks_it_to_speak_again() -> None:
    chat = Chat()
    chat.ask(chat.ask([user("x")], "A<e>"), "B<e>")
    assert chat.parts() == [["<u>x<e><a>", "A<e>", "<a>", "B<e>"]]


def test_a_later_system_message_that_a_template_refuses_is_shown_as_a_users() -> None:
    first = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first!') }}{% endif %}"
    chat = Chat(PLAIN.replace("<{{ m.role[0] }}>", first + "<{{ m.role[0] }}>"))
    messages = chat.ask([user("x"), {"role": "system", "content": "s"}], "A<e>")
    chat.ask([*messages, user("y")], "B<e>")
    assert chat.parts() == [["<u>x<e><u>s<e><a>", "A<e>", "<u>y<e><a>", "B<e>"]]


@pytest.mark.parametrize("key", ["reasoning", "thinking"])
def test_reasoning_is_given_to_templates_under_the_name_that_they_use(key: str) -> None:
    chat = Chat(KEEPS_THOUGHTS.replace("reasoning_content", key))
    messages = chat.ask([user("x")], "[hm]A<e>", ParsedTurn("A", "hm"))
    chat.ask([*messages, user("y")], "B<e>")
    assert opened(chat) == ["new"]


def test_a_history_is_never_tokenised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Chat()
    messages = [*chat.ask([user("x" * 100)], "A<e>"), user("y")]
    tokenised: list[str] = []

    class Counting(ChatRenderer):
        def tokenize(self, text: str) -> list[int]:
            tokenised.append(text)
            return super().tokenize(text)

    monkeypatch.setattr(chat.renderer, "__class__", Counting)
    chat.session.begin(messages)
    assert tokenised == ["<e><u>y<e><a>"]
