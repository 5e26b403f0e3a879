"""The stub that stands in for vLLM is trusted by every other test, so it is tested itself, from outside."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

ROOT = Path(__file__).parent.parent
TRANSCRIPTS = Path(__file__).parent / "transcripts" / "vllm-0.32"
CHAT = "/v1/chat/completions"


class Stub:
    """A stub in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self.address = ("127.0.0.1", int(url.rpartition(":")[2]))


@contextmanager
def running(*options: str) -> Iterator[Stub]:
    command = [sys.executable, str(ROOT / "scripts" / "stub_upstream.py"), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+)\n", line)
            assert found, line
            yield Stub(process, found[1])
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def shared() -> Iterator[Stub]:
    with running() as stub:
        yield stub


@pytest.fixture
def slow() -> Iterator[Stub]:
    """One whose answers last longer than any test, so that what is in flight stays so until the client leaves."""
    with running("--hold-seconds", "600") as stub:
        yield stub


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def quick(shared: Stub, session: aiohttp.ClientSession) -> Stub:
    """One that answers at once, with a fresh account."""
    async with session.post(f"{shared.url}/__reset") as response:
        assert response.status == 200
    return shared


async def account(session: aiohttp.ClientSession, stub: Stub) -> dict[str, Any]:
    async with session.get(f"{stub.url}/__stats") as response:
        seen: dict[str, Any] = await response.json()
        return seen


async def account_becomes(session: aiohttp.ClientSession, stub: Stub, **expected: object) -> dict[str, Any]:
    """The account once it is as expected; each look at it is a round trip, so this does not spin."""
    async with asyncio.timeout(10):
        while True:
            seen = await account(session, stub)
            if all(seen[name] == value for name, value in expected.items()):
                return seen


def chat(*, tag: int | None = None, **more: object) -> dict[str, object]:
    content = "Hello" if tag is None else f"Hello tag:{tag}"
    return {"model": "reasoning", "messages": [{"role": "user", "content": content}], **more}


def raw(body: dict[str, object], path: str = CHAT, *headers: str) -> bytes:
    payload = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: stub", f"content-length: {len(payload)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + payload


def recorded(name: str) -> tuple[bytes, list[str], str]:
    """The request of a transcript, the header names of its response, and the response's body."""
    # The files end with a newline that was not sent.
    request = (TRANSCRIPTS / f"{name}.request.json").read_bytes().rstrip(b"\n")
    head = (TRANSCRIPTS / f"{name}.headers.txt").read_text().split("\n")
    names = [line.partition(":")[0] for line in head[1:] if ":" in line]
    return request, names, (TRANSCRIPTS / f"{name}.body.txt").read_text()


def documents(stream: str) -> list[Any]:
    """The data of each event; ``[DONE]`` as it is."""
    data = [line.removeprefix("data: ") for line in stream.split("\n") if line.startswith("data: ")]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def shape(value: Any, *, types: bool) -> Any:
    """Member names in their order, and the types of what they hold.

    The recorded model put all its text into ``reasoning``; the stub says it aloud.
    """
    if isinstance(value, dict):
        names = {"reasoning": "content"} if "content" not in value else {}
        return [(names.get(name, name), shape(member, types=types)) for name, member in value.items()]
    if isinstance(value, list):
        return [shape(item, types=types) for item in value]
    return type(value).__name__ if types else None


# -- what it answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("chat-stream-usage", CHAT),
        ("chat-stream-no-usage", CHAT),
        ("chat-stream-continuous-usage", CHAT),
        ("completions-stream", "/v1/completions"),
    ],
)
async def test_stream_has_the_recorded_shape(quick: Stub, session: aiohttp.ClientSession, name: str, path: str) -> None:
    """A stream has the events of the real server, with the same members in the same order."""
    request, header_names, expected = recorded(name)
    async with session.post(quick.url + path, data=request) as response:
        assert header_names == [field.decode() for field, _ in response.raw_headers]
        text = await response.text()
    assert [shape(each, types=True) for each in documents(expected)] == [
        shape(each, types=True) for each in documents(text)
    ]
    assert re.sub(r"data: .*", "data", expected) == re.sub(r"data: .*", "data", text)


@pytest.mark.parametrize(
    ("name", "path"),
    [("chat-whole", CHAT), ("completions-whole-two-prompts", "/v1/completions")],
)
async def test_document_has_the_recorded_shape(
    quick: Stub, session: aiohttp.ClientSession, name: str, path: str
) -> None:
    """A whole answer has the members of the real server's, in the same order."""
    request, header_names, expected = recorded(name)
    async with session.post(quick.url + path, data=request) as response:
        assert header_names == [field.decode() for field, _ in response.raw_headers]
        text = await response.text()
    assert shape(json.loads(expected), types=False) == shape(json.loads(text), types=False)


async def test_responses_document_has_the_recorded_shape(quick: Stub, session: aiohttp.ClientSession) -> None:
    """A whole response has the members of the real server's; its output is a message instead of reasoning."""
    request, _, expected = recorded("responses-whole")
    async with session.post(f"{quick.url}/v1/responses", data=request) as response:
        document = await response.json()
    assert [item["type"] for item in document["output"]] == ["message"]
    real = json.loads(expected)
    for each in (real, document):
        each["output"] = []
    assert shape(real, types=True) == shape(document, types=True)


async def test_responses_stream_has_the_recorded_events(quick: Stub, session: aiohttp.ClientSession) -> None:
    """A streamed response tells the same events in the same order, about text instead of reasoning."""
    request, _, expected = recorded("responses-stream")
    async with session.post(f"{quick.url}/v1/responses", data=request) as response:
        text = await response.text()

    def names(stream: str) -> list[str]:
        told = re.findall(r"^event: (.*)$", stream.replace("reasoning_text", "output_text"), re.MULTILINE)
        return [name for i, name in enumerate(told) if told[i - 1 : i] != [name]]

    assert names(expected) == names(text)
    real, ours = documents(expected), documents(text)
    for i in (0, 1, -1):
        real[i]["response"]["output"] = ours[i]["response"]["output"] = []
        assert shape(real[i], types=True) == shape(ours[i], types=True)
    assert list(range(len(ours))) == [each["sequence_number"] for each in ours]


async def test_model_list_has_the_recorded_shape(quick: Stub, session: aiohttp.ClientSession) -> None:
    """The list of models has the members of the real server's."""
    async with session.get(f"{quick.url}/v1/models") as response:
        document = await response.json()
    real = json.loads((TRANSCRIPTS / "models.json").read_text())
    real["data"][0]["permission"] = []
    assert shape(real, types=True) == shape(document, types=True)


@pytest.mark.parametrize(
    ("name", "status"), [("error-unknown-model", 404), ("error-not-json", 400), ("error-validation", 400)]
)
async def test_errors_are_the_recorded_ones(
    quick: Stub, session: aiohttp.ClientSession, name: str, status: int
) -> None:
    """An unknown model, a body that is not JSON and a wrong type are refused in the real server's words."""
    request, header_names, expected = recorded(name)
    async with session.post(quick.url + CHAT, data=request) as response:
        assert header_names == [field.decode() for field, _ in response.raw_headers]
        assert (status, json.loads(expected)) == (response.status, await response.json())
    assert (await account(session, quick))["started"] == 0


async def test_refused_methods_and_paths(quick: Stub, session: aiohttp.ClientSession) -> None:
    """What is not there is a 404 and a wrong method a 405, both as JSON errors."""
    async with session.post(f"{quick.url}/v1/nothing", json={}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, 404)
    async with session.get(quick.url + CHAT) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (405, 405)


async def test_health(quick: Stub, session: aiohttp.ClientSession) -> None:
    """Health is an empty 200."""
    async with session.get(f"{quick.url}/health") as response:
        assert (response.status, await response.read()) == (200, b"")


async def test_empty_conversation_is_answered(quick: Stub, session: aiohttp.ClientSession) -> None:
    """An empty list of messages gets an answer, since the acceptance commands send one."""
    async with session.post(quick.url + CHAT, json={"model": "reasoning", "messages": []}) as response:
        assert response.status == 200
        choice = (await response.json())["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].startswith("Hello! I am a stub")


async def test_official_client_understands_it(quick: Stub) -> None:
    """OpenAI's own client reads every kind of answer, and the same text whole and streamed."""
    async with openai.AsyncOpenAI(base_url=f"{quick.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Hello"}]
        whole = await client.chat.completions.create(model="reasoning", messages=messages)
        stream = await client.chat.completions.create(model="reasoning", messages=messages, stream=True)
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert whole.choices[0].message.content == streamed

        response = await client.responses.create(model="reasoning", input="Hello")
        events = [event async for event in await client.responses.create(model="reasoning", input="Hello", stream=True)]
        told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert response.output_text == told == streamed

        completion = await client.completions.create(model="reasoning", prompt="Hello")
        assert completion.choices[0].text == streamed

        # The client asks for base64 unless told otherwise.
        packed = await client.embeddings.create(model="reasoning", input=["one", "two"])
        plain = await client.embeddings.create(model="reasoning", input=["one", "two"], encoding_format="float")
        assert [pytest.approx(each.embedding) for each in plain.data] == [each.embedding for each in packed.data]


async def test_number_of_events_is_chosen(session: aiohttp.ClientSession) -> None:
    """A stream has as many pieces of text as asked for, even more than there is to say."""
    with running("--events", "200") as stub:
        async with session.post(stub.url + CHAT, json=chat(stream=True)) as response:
            told = documents(await response.text())
    assert sum(1 for each in told if each != "[DONE]" and each["choices"][0]["delta"].get("content")) == 200


async def test_models_are_chosen(session: aiohttp.ClientSession) -> None:
    """It serves the models it was told to, and no other."""
    with running("--model", "one", "--model", "two") as stub:
        async with session.get(f"{stub.url}/v1/models") as response:
            assert [card["id"] for card in (await response.json())["data"]] == ["one", "two"]
        async with session.post(stub.url + CHAT, json=chat()) as response:
            assert "The model `reasoning` does not exist. Valid aliases: one, two." in await response.text()


# -- the account ----------------------------------------------------------------------------------------------------


async def test_account_of_simultaneous_requests(session: aiohttp.ClientSession) -> None:
    """The peak is how many were in flight together, and the tags are in order of arrival."""
    with running("--hold-seconds", "0.3") as stub:
        tasks = []
        for tag in (3, 1, 2):
            tasks.append(asyncio.create_task(session.post(stub.url + CHAT, json=chat(tag=tag, stream=tag == 1))))
            await account_becomes(session, stub, in_flight=len(tasks))
        for response in await asyncio.gather(*tasks):
            assert response.status == 200
            await response.read()
        seen = await account(session, stub)
    assert seen == {
        "in_flight": 0,
        "sequences": 0,
        "max_in_flight": 3,
        "max_sequences": 3,
        "started": 3,
        "completed": 3,
        "aborted": 0,
        "order": [3, 1, 2],
        "aborted_order": [],
    }


async def test_one_after_another_is_no_overlap(quick: Stub, session: aiohttp.ClientSession) -> None:
    """Requests that follow each other never count as two at once."""
    for _ in range(20):
        async with session.post(quick.url + CHAT, json=chat()) as response:
            await response.read()
    seen = await account(session, quick)
    assert (seen["max_in_flight"], seen["completed"]) == (1, 20)


async def test_account_counts_sequences(quick: Stub, session: aiohttp.ClientSession) -> None:
    """Each choice and each prompt takes a sequence of its own."""
    body = {"model": "reasoning", "prompt": ["one", "two", "three"], "n": 2, "max_tokens": 1}
    async with session.post(f"{quick.url}/v1/completions", json=body) as response:
        assert list(range(6)) == [choice["index"] for choice in (await response.json())["choices"]]
    seen = await account(session, quick)
    assert (seen["max_in_flight"], seen["max_sequences"]) == (1, 6)


async def test_choices_are_streamed_side_by_side(quick: Stub, session: aiohttp.ClientSession) -> None:
    """Each of several choices begins with a role and ends with a reason."""
    async with session.post(quick.url + CHAT, json=chat(n=2, stream=True, max_tokens=2)) as response:
        told = [each["choices"][0] for each in documents(await response.text())[:-1]]
    assert [choice["index"] for choice in told if "role" in choice["delta"]] == [0, 1]
    assert [choice["index"] for choice in told if choice["finish_reason"] == "length"] == [0, 1]


@pytest.mark.parametrize("stream", [True, False], ids=["mid-stream", "before the first byte"])
async def test_abort_is_counted(slow: Stub, session: aiohttp.ClientSession, stream: bool) -> None:
    """A client that leaves before its answer is whole counts as an abort and is no longer in flight."""
    _, writer = await asyncio.open_connection(*slow.address)
    writer.write(raw(chat(tag=7, stream=stream)))
    await account_becomes(session, slow, in_flight=1)
    writer.close()
    seen = await account_becomes(session, slow, in_flight=0)
    assert (seen["started"], seen["aborted"], seen["completed"], seen["aborted_order"]) == (1, 1, 0, [7])


async def test_leaving_after_the_end_is_no_abort(quick: Stub, session: aiohttp.ClientSession) -> None:
    """A connection that closes between requests aborts nothing."""
    async with session.post(quick.url + CHAT, json=chat(), headers={"connection": "close"}) as response:
        assert response.headers["connection"] == "close"
        await response.read()
    seen = await account(session, quick)
    assert (seen["completed"], seen["aborted"]) == (1, 0)


async def test_slot_handed_over_is_no_overlap(slow: Stub, session: aiohttp.ClientSession) -> None:
    """A request sent after another connection has closed never counts as simultaneous with the one that was on it."""
    current = socket.create_connection(slow.address)
    current.sendall(raw(chat()))
    for started in range(1, 31):
        await account_becomes(session, slow, started=started, in_flight=1)
        following = socket.create_connection(slow.address)
        current.close()
        following.sendall(raw(chat()))
        current = following
    current.close()
    seen = await account_becomes(session, slow, in_flight=0)
    assert seen["max_in_flight"] == 1


async def test_reset_keeps_what_is_in_flight(slow: Stub, session: aiohttp.ClientSession) -> None:
    """A new account begins with what is still running, and nothing else."""
    _, writer = await asyncio.open_connection(*slow.address)
    writer.write(raw(chat(tag=1)))
    await account_becomes(session, slow, in_flight=1)
    async with session.post(f"{slow.url}/__reset") as response:
        seen = await response.json()
    assert (seen["in_flight"], seen["max_in_flight"], seen["started"], seen["order"]) == (1, 1, 0, [])
    writer.close()
    await account_becomes(session, slow, in_flight=0)


async def test_log_has_a_line_per_change(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """The log tells after every change how many are in flight, and how many were at most."""
    log = tmp_path / "stub.log"
    with running("--hold-seconds", "600", "--log", str(log)) as stub:
        writers = []
        for tag in (1, 2):
            _, writer = await asyncio.open_connection(*stub.address)
            writer.write(raw(chat(tag=tag)))
            writers.append(writer)
            await account_becomes(session, stub, in_flight=tag)
        writers[0].close()
        await account_becomes(session, stub, in_flight=1)
        lines = [line.partition(" ")[2] for line in log.read_text().splitlines()]
        writers[1].close()
    assert [
        f"max_concurrent=1 in_flight=1 started {CHAT} tag=1",
        f"max_concurrent=2 in_flight=2 started {CHAT} tag=2",
        f"max_concurrent=2 in_flight=1 aborted {CHAT} tag=1",
    ] == lines


# -- how it answers -------------------------------------------------------------------------------------------------


async def test_stream_begins_while_the_slot_is_held(slow: Stub, session: aiohttp.ClientSession) -> None:
    """The first event comes at once, long before the answer is over."""
    async with session.post(slow.url + CHAT, json=chat(stream=True)) as response:
        first = await response.content.readline()
        assert documents(first.decode())[0]["choices"][0]["delta"]["role"] == "assistant"
        assert (await account(session, slow))["in_flight"] == 1


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_answer_takes_the_time_asked_for(session: aiohttp.ClientSession, stream: bool) -> None:
    """An answer holds its slot for as long as the command line says."""
    with running("--hold-seconds", "0.2") as stub:
        began = time.monotonic()
        async with session.post(stub.url + CHAT, json=chat(stream=stream)) as response:
            await response.read()
        assert time.monotonic() - began >= 0.2


async def test_requests_share_a_connection(quick: Stub) -> None:
    """Requests follow each other on one connection, also when sent before the answer, whole or in chunks."""
    reader, writer = await asyncio.open_connection(*quick.address)
    payload = json.dumps(chat(max_tokens=1)).encode()
    cut = len(payload) // 2
    chunked = b"".join(b"%x;x=y\r\n%s\r\n" % (len(part), part) for part in (payload[:cut], payload[cut:]))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: stub\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    last = raw(chat(max_tokens=1), CHAT, "connection: close")
    sent = raw(chat(max_tokens=1)) + head + chunked + b"0\r\ntrailer: x\r\n\r\n" + head + chunked + b"0\r\n\r\n" + last
    for at in range(0, len(sent), 100):
        writer.write(sent[at : at + 100])
        await writer.drain()
    async with asyncio.timeout(10):
        received = await reader.read()
    writer.close()
    assert received.count(b"HTTP/1.1 200 OK") == 4
    assert received.count(b'"content":"Hello!"') == 4


async def test_nonsense_closes_the_connection(quick: Stub) -> None:
    """What is not HTTP is refused and the connection closed."""
    reader, writer = await asyncio.open_connection(*quick.address)
    writer.write(b"nonsense\r\n\r\n")
    async with asyncio.timeout(10):
        received = await reader.read()
    writer.close()
    assert received.startswith(b"HTTP/1.1 400 ")


# -- its process ----------------------------------------------------------------------------------------------------


async def test_sigterm_ends_it(slow: Stub, session: aiohttp.ClientSession) -> None:
    """It ends cleanly on SIGTERM even with a request in flight."""
    _, writer = await asyncio.open_connection(*slow.address)
    writer.write(raw(chat()))
    await account_becomes(session, slow, in_flight=1)
    slow.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(slow.process.wait, 10) == 0
    writer.close()


def test_port_in_use_is_said(shared: Stub) -> None:
    """A port that is taken is one line and exit 1."""
    command = [sys.executable, str(ROOT / "scripts" / "stub_upstream.py"), "--port", str(shared.address[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "address already in use" in done.stderr
