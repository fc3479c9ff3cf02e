"""Whatever arrives over HTTP, the chat server answers it soon in the form of a wire or closes the connection, tells
nothing of another session, records nothing that it refused, and works afterwards."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.recipe import AgentConfig, SamplingConfig
from stages.capture import server as server_module
from stages.capture.marks import Marks
from stages.capture.recorder import Recorder
from stages.capture.server import CaptureServer
from tests.chats import renderer
from tests.test_capture_server import Engine
from tests.test_wires_properties import mutated

ANSWER_SECONDS = 5.0
BODY_SECONDS = 0.4
SECRETS = (b"planted-in-the-prompt", b"planted-in-the-answer")
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "anthropic": "/v1/messages"}
MALFORMED = b"Invalid HTTP request received."
"""What the HTTP server itself says to what is no HTTP."""


@dataclass
class Session:
    recorder: Recorder
    url: str
    opened: Any

    @property
    def path(self) -> str:
        return urlsplit(self.url).path

    @property
    def num_sampled(self) -> int:
        return sum(len(segment.turns) for segment in self.recorder.session.segments())

    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.recorder.key}", "content-type": "application/json"}


class World:
    """A server in a thread of its own, and a session whose secrets nobody else may see."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = CaptureServer()
        self.do(self.server.start())
        self.victim = self.open(Engine(SECRETS[1].decode() + "<e>"))
        self.port = urlsplit(self.victim.url).port
        assert self.ask(self.victim, SECRETS[0].decode())[0] == 200

    def do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=10)

    def open(self, engine: Engine, **config: Any) -> Session:
        agent = AgentConfig(entry="a:B", **({"max_context_tokens": 100_000, "max_turns": 1000} | config))
        recorder = Recorder(engine.sample, renderer(), Marks(renderer()), agent, SamplingConfig(max_tokens=100))

        async def enter() -> Session:
            opened = self.server.open(recorder)
            return Session(recorder, await opened.__aenter__(), opened)

        return self.do(enter())

    def close(self, session: Session) -> None:
        self.do(session.opened.__aexit__(None, None, None))

    def end(self) -> None:
        self.close(self.victim)
        self.do(self.server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=10)

    def ask(self, session: Session, text: str) -> tuple[int, bytes]:
        """A plain request."""
        body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()
        answer = self.send(request("POST", session.path + PATHS["chat"], session.headers(), body))
        assert answer is not None
        return answer

    def send(self, *parts: bytes | float, method: str = "POST", hang_up: bool = False) -> tuple[int, bytes] | None:
        """Status and body of the answer to bytes sent with pauses in between; None for a closed connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=ANSWER_SECONDS) as connection:
            try:
                for part in parts:
                    if isinstance(part, bytes):
                        connection.sendall(part)
                    else:
                        time.sleep(part)
                if hang_up:
                    return None
                answer = http.client.HTTPResponse(connection, method=method)
                answer.begin()
                return answer.status, answer.read()
            except (http.client.BadStatusLine, http.client.IncompleteRead, ConnectionError):
                return None


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "BODY_SECONDS", BODY_SECONDS)
        made = World()
        yield made
        made.end()


def request(method: str, path: str, headers: dict[str, str], body: bytes, chunks: int | None = None) -> bytes:
    """A request as bytes; `chunks` is the size of its chunks if it is chunked."""
    head = {"host": "x", "connection": "close"} | headers
    if chunks is None:
        head.setdefault("content-length", str(len(body)))
    else:
        head["transfer-encoding"] = "chunked"
        pieces = [body[start : start + chunks] for start in range(0, len(body), chunks)]
        body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
    return "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + body


def holds(world: World, session: Session, answer: tuple[int, bytes] | None, path: str, method: str = "POST") -> None:
    """What must be true of any answer."""
    if answer is None:
        return
    status, body = answer
    assert status < 500, (status, body[:300])
    assert not any(secret in body for secret in (*SECRETS, world.victim.recorder.key.encode()))
    assert world.victim.path.encode() not in body or world.victim.path in path, "an error may repeat the path"
    if status >= 400 and method != "HEAD" and body != MALFORMED:
        error = json.loads(body)
        if "/v1/messages" in path:
            assert error["type"] == "error" and {"type", "message"} <= error["error"].keys()
        elif "type" not in error:
            assert {"type", "message", "param", "code"} <= error["error"].keys()


def is_as_before(world: World, session: Session, num_answers: int) -> None:
    """Only answers of 200 were recorded; everyone is served."""
    assert session.num_sampled <= num_answers
    before = session.num_sampled
    assert world.ask(session, "and now?")[0] == 200
    assert session.num_sampled == before + 1
    assert world.victim.num_sampled == 1 and session.recorder.num_active == 0


# ---- requests ----

odd_text = st.text(max_size=30)
latin = st.text(st.characters(min_codepoint=33, max_codepoint=255), max_size=20)
methods = st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "BREW", "PROPFIND"])
raw_bodies = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [
            b"",
            b"{",
            b"null",
            b'{"model": "policy", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
            b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud83d"}]}',
            b'{"model": "policy", "messages": [{"role": "user", "content": "\\u0000"}]}',
            b'{"model": "policy", "max_tokens": 1' + b"0" * 5000 + b"}",
            b'{"model": "policy", "temperature": 1e999}',
            b'{"model": "policy", "temperature": NaN}',
            b"[" * 100_000,
            b'{"a":' * 900 + b"1" + b"}" * 900,
            b'{"model": "policy", "messages": [{"role": "user", "content": "hi"}], "n": 129}',
            '{"model": "policy"}'.encode("utf-16"),
            b'{"model": "policy", "messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": '
            b'{"name": "f", "arguments": "' + b"[" * 5000 + b'"}}]}]}',
        ]
    ),
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A wire and a body for it: a changed valid one for the policy, or anything."""
    wire = draw(st.sampled_from(sorted(PATHS)))
    if draw(st.booleans()):
        return wire, draw(raw_bodies)
    body = draw(mutated(wire))
    if draw(st.integers(0, 3)):  # no model of these tests takes images
        body = _without_images(body)
    if isinstance(body, dict) and draw(st.integers(0, 3)):
        body["model"] = draw(st.sampled_from(["policy", "policy", "policy-unrecorded"]))
    return wire, json.dumps(body).encode()


def _without_images(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_images(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") in ("image", "image_url", "input_image"):
        return {"type": "text", "text": "a cat"}
    return {key: _without_images(item) for key, item in value.items()}


def headers_of(session: Session) -> st.SearchStrategy[dict[str, str]]:
    key = session.recorder.key
    return st.fixed_dictionaries(
        {},
        optional={
            "authorization": st.sampled_from([f"Bearer {key}", f"bearer  {key} ", f"Basic {key}", "Bearer", key])
            | latin,
            "x-api-key": st.just(key) | latin,
            "anthropic-version": latin,
            "content-type": st.sampled_from(["text/plain", "application/json", "multipart/form-data", "a;charset=x"]),
            "content-encoding": st.sampled_from(["gzip", "identity"]),
            "expect": st.just("100-continue"),
            "upgrade": st.just("websocket"),
            "x-stainless-retry-count": st.sampled_from(["0", "1", "", "-1", "x"]) | latin,
            "content-length": st.sampled_from(["0", "-1", "x", "99999999999999999999", "+3"]),
        },
    )


def paths_of(session: Session, victim: Session) -> st.SearchStrategy[str]:
    own = st.sampled_from([session.path, victim.path, "/s/", "/s/x", session.path.upper(), session.path + "/"])
    tails = st.sampled_from(
        [
            *PATHS.values(), "/v1/models", "/v1/models/policy", "/v1/models/%00", "/v1/models/a%2Fb",
            "/v1/messages/count_tokens", "", "/", "/v1", "/v1/../../..", "?a=b", "/v1/models?x=%ff", "/v1//responses",
        ]
    )  # fmt: skip
    return st.builds(str.__add__, own, tails) | latin.map(lambda text: "/" + text) | st.just("/" + "a" * 20_000)


FUZZ = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@given(data=st.data())
@FUZZ
def test_any_request_is_answered_in_the_form_of_a_wire_or_closed(world: World, data: st.DataObject) -> None:
    session = world.open(Engine("A<e>"))
    method, path = data.draw(methods), data.draw(paths_of(session, world.victim))
    headers, (_, body) = data.draw(headers_of(session)), data.draw(bodies())
    answer = world.send(request(method, path, headers, body), method=method)
    holds(world, session, answer, path, method)
    is_as_before(world, session, num_answers=1 if answer and answer[0] == 200 else 0)
    world.close(session)


@given(data=st.data(), chunks=st.none() | st.integers(1, 50))
@FUZZ
def test_any_body_with_the_right_key_is_answered(world: World, data: st.DataObject, chunks: int | None) -> None:
    session = world.open(Engine("A<e>"))
    wire, body = data.draw(bodies())
    path = session.path + PATHS[wire]
    answer = world.send(request("POST", path, session.headers(), body, chunks))
    assert answer is not None
    holds(world, session, answer, path)
    is_as_before(world, session, num_answers=128 if answer[0] == 200 else 0)
    world.close(session)


@given(data=st.data())
@FUZZ
def test_several_sessions_at_once_do_not_touch_each_other(world: World, data: st.DataObject) -> None:
    sessions = [world.open(Engine(f"only-for-{index}<e>", seconds=0.01)) for index in range(3)]
    plans = [(index, data.draw(bodies()), data.draw(st.booleans())) for index in (0, 1, 2, 0, 1, 2)]
    answers: list[Any] = [None] * len(plans)

    def send(place: int) -> None:
        index, (wire, body), hang_up = plans[place]
        sent = request("POST", sessions[index].path + PATHS[wire], sessions[index].headers(), body)
        answers[place] = world.send(sent, hang_up=hang_up)

    threads = [threading.Thread(target=send, args=(place,)) for place in range(len(plans))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=2 * ANSWER_SECONDS)
        assert not thread.is_alive()
    for (index, (wire, _), _), answer in zip(plans, answers, strict=True):
        holds(world, sessions[index], answer, PATHS[wire])
        for other in {0, 1, 2} - {index}:
            assert answer is None or f"only-for-{other}".encode() not in answer[1]
    for session in sessions:
        world.close(session)
    assert world.victim.num_sampled == 1


@given(data=st.data())
@FUZZ
def test_a_client_that_goes_or_stalls_anywhere_in_its_request_costs_nothing(world: World, data: st.DataObject) -> None:
    session = world.open(Engine("A<e>", seconds=data.draw(st.sampled_from([0.0, 0.05]))))
    wire, body = data.draw(bodies())
    whole = request("POST", session.path + PATHS[wire], session.headers(), body)
    cut = data.draw(st.integers(1, len(whole)))
    parts: list[Any] = [whole[:cut]]
    if stalls := data.draw(st.booleans()) and data.draw(st.booleans()):
        parts += [0.02, whole[cut:]]
    answer = world.send(*parts, hang_up=not stalls)
    holds(world, session, answer, PATHS[wire])
    deadline = time.monotonic() + ANSWER_SECONDS
    while session.recorder.num_active and time.monotonic() < deadline:
        time.sleep(0.005)
    assert session.recorder.num_active == 0
    world.close(session)


def test_a_body_that_does_not_arrive_is_refused_in_time(world: World) -> None:
    session = world.open(Engine("A<e>"))
    head = request("POST", session.path + PATHS["anthropic"], _stalling(session), b'{"a')
    start = time.monotonic()
    answer = world.send(head)
    assert answer is not None and answer[0] == 408 and json.loads(answer[1])["type"] == "error"
    assert BODY_SECONDS <= time.monotonic() - start < ANSWER_SECONDS
    drip = [part for byte in b'{"a": 1' for part in (bytes([byte]), 0.1)]
    answer = world.send(head, *drip)
    assert answer is not None and answer[0] == 408
    is_as_before(world, session, num_answers=0)
    world.close(session)


def _stalling(session: Session) -> dict[str, str]:
    return session.headers() | {"content-length": "100", "connection": "keep-alive"}


def test_a_session_answers_no_more_requests_at_once_than_it_may(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_ACTIVE_REQUESTS", 2)
    session = world.open(Engine("A<e>"))
    head = request("POST", session.path + PATHS["chat"], _stalling(session), b"{")
    waiting = [threading.Thread(target=world.send, args=(head,)) for _ in range(2)]
    for thread in waiting:
        thread.start()
    time.sleep(BODY_SECONDS / 2)
    status, body = world.ask(session, "hi")
    assert status == 429 and "2 requests under way" in json.loads(body)["error"]["message"]
    assert world.ask(world.open(Engine("A<e>")), "hi")[0] == 200
    for thread in waiting:
        thread.join(timeout=ANSWER_SECONDS)
    is_as_before(world, session, num_answers=0)
    world.close(session)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", sorted(PATHS))
def test_requests_under_way_when_their_session_closes_are_refused(world: World, wire: str, stream: bool) -> None:
    engine = Engine("A<e>", seconds=30.0)
    session = world.open(engine)
    asked: dict[str, Any] = {"model": "policy", "stream": stream}
    asked |= {"input": "hi"} if wire == "responses" else {"messages": [{"role": "user", "content": "hi"}]}
    whole = request("POST", session.path + PATHS[wire], session.headers(), json.dumps(asked).encode())
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(world.send(whole)))
    thread.start()
    while not engine.prompts:
        time.sleep(0.005)
    world.close(session)
    thread.join(timeout=ANSWER_SECONDS)
    (answer,) = answers
    assert answer is not None and answer[0] == 401 and b"session is closed" in answer[1]
    holds(world, session, answer, PATHS[wire])
    assert engine.aborted == 1 and session.num_sampled == 0
