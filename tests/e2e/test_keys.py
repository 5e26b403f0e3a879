"""Keys from outside: who is let in, what is told to whoever is not, what each holder sees, and what goes upstream."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rig import (
    ANTHROPIC,
    OPENAI,
    SURFACES,
    TEXT,
    Response,
    Rig,
    Surface,
    answer,
    configuration,
    everywhere,
    make_certificate,
    needs_openssl,
    request_bytes,
    upstream_table,
)

ALICE, BOB, UPSTREAM = "sk-alice-key", "sk-bob-key", "sk-upstream-key"

Auth = Callable[..., dict[str, Any]]


@pytest.fixture
def secret(tmp_path: Path) -> Callable[[str, str], str]:
    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.touch(0o600)
        path.write_text(text + "\n")
        return str(path)

    return write


@pytest.fixture
def auth(secret: Callable[[str, str], str]) -> Auth:
    """Two holders of keys; the changes are Bob's."""

    def table(**changes: Any) -> dict[str, Any]:
        bob = {"file": secret("bob", BOB), "models": "all", "queue_places": 8, **changes}
        alice = {"file": secret("alice", ALICE), "models": "all", "queue_places": 8}
        return {"mode": "keys", "keys": {"alice": alice, "bob": bob}}

    return table


def bearer(key: str) -> str:
    return f"authorization: Bearer {key}"


def told(response: Response) -> tuple[str, bytes]:
    """All of a response but what differs from one to the next anyhow."""
    head = re.sub(r"(?im)^date: .*$", "date", response.raw_head.decode())
    request_id = response.header("x-request-id") or ""
    return head.replace(request_id, "ID"), response.body.replace(request_id.encode(), b"ID")


# -- who is let in --------------------------------------------------------------------------------------------------


@everywhere
async def test_a_holder_is_let_in_and_named(rig: Rig, surface: Surface, process: bool, auth: Auth) -> None:
    """With the key in either field, and the log has its name."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, process=process, auth=auth())
    for number, header in enumerate((bearer(ALICE), f"x-api-key: {ALICE}", f"X-Api-Key:{ALICE}\r\n{bearer(ALICE)}")):
        response = await rig.ask(gateway, surface, number, header, f"x-request-id: id-{number}")
        assert (response.status, surface.text(response)) == (200, TEXT)
        assert (await gateway.record(request_id=f"id-{number}"))["key"] == "alice"


WRONG = (
    (),
    (bearer("sk-alice-kez"),),
    (bearer(""),),
    (f"authorization: Basic {ALICE}",),
    (f"authorization: {ALICE}",),
    (bearer(ALICE), f"x-api-key: {BOB}"),
    (f"x-api-key: {ALICE}", bearer("x")),
    (bearer(ALICE), bearer(BOB)),
    (bearer(UPSTREAM),),
    ("x-api-key: sk-älice",),
    (f"api-key: {ALICE}", f"cookie: key={ALICE}"),
)


@everywhere
async def test_whatever_is_wrong_the_answer_is_the_same(
    rig: Rig, surface: Surface, process: bool, auth: Auth, secret: Callable[[str, str], str]
) -> None:
    """Absent, wrong and malformed: status, fields and body are equal to the byte, and nothing reaches an upstream."""
    upstream = await rig.upstream(answer)
    path = secret("upstream", UPSTREAM)
    gateway = await rig.gateway(upstream, process=process, auth=auth(), credential_file=path)
    answers = set()
    for number, headers in enumerate(WRONG):
        request_id = f"id-{number:02}"
        response = await rig.ask(gateway, surface, 1, *headers, f"x-request-id: {request_id}")
        assert response.status == 401
        assert response.header("www-authenticate") == "Bearer"
        assert response.header("x-should-retry") == "false"
        assert "valid key" in surface.error(response)["message"]
        answers.add(told(response))
        record = await gateway.record(request_id=request_id)
        assert (record["outcome"], record["status"], record["request_bytes"]) == ("invalid_api_key", 401, 0)
        assert "key" not in record
    assert len(answers) == 1
    assert upstream.exchanges == []


async def test_the_words_of_each_surface(rig: Rig, auth: Auth) -> None:
    """The SDKs of both know by them that it is the key."""
    gateway = await rig.gateway(await rig.upstream(), auth=auth())
    openai = await rig.ask(gateway, OPENAI)
    assert OPENAI.code(openai) == "invalid_api_key"
    error = OPENAI.error(openai)
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    assert ANTHROPIC.error(await rig.ask(gateway, ANTHROPIC))["type"] == "authentication_error"


@pytest.mark.parametrize("surface", SURFACES[:2], ids=lambda surface: surface.name)
async def test_the_key_comes_before_everything_else(rig: Rig, surface: Surface, auth: Auth) -> None:
    """Without one nobody learns what paths, methods and models there are."""
    gateway = await rig.gateway(await rig.upstream(), auth=auth())
    first = None
    for method, path in (
        ("GET", surface.models_path),
        ("GET", f"{surface.models_path}/reasoning"),
        ("GET", f"{surface.path}/nothing"),
        ("DELETE", surface.path),
        ("POST", surface.path),
    ):
        client = await rig.client(gateway)
        await client.request(method, path, b"{" if method == "POST" else None)
        response = await client.response()
        assert response.status == 401
        first = first or told(response)
        assert told(response) == first


@everywhere
async def test_no_body_is_waited_for(rig: Rig, surface: Surface, process: bool, auth: Auth) -> None:
    """The answer is there before the body, and a client that asks whether to send it is not told to."""
    gateway = await rig.gateway(await rig.upstream(), process=process, auth=auth())
    for more in ((), ("expect: 100-continue",)):
        client = await rig.client(gateway)
        await client.request("POST", surface.path, None, "content-length: 1000000", *more)
        response = await client.response()
        assert response.status == 401
        client.close()


@pytest.mark.parametrize("process", [False, True], ids=["in-process", "daemon"])
@pytest.mark.parametrize(
    "doubtful",
    [
        ("transfer-encoding: gzip, chunked",),
        ("transfer-encoding: identity",),
        ("transfer-encoding: chunked, chunked",),
        ("transfer-encoding: chunked",),
        ("transfer-encoding: chunked", "content-length: 5"),
        ("content-length: 18446744073709551615",),
    ],
    ids=lambda lines: lines[-1],
)
async def test_nothing_behind_a_request_without_a_key_is_one(
    rig: Rig, process: bool, auth: Auth, doubtful: tuple[str, ...]
) -> None:
    """Wherever its body ends, the connection does, too: a good request behind it is not taken for one."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, process=process, auth=auth())
    client = await rig.client(gateway)
    hidden = request_bytes("POST", OPENAI.path, OPENAI.body(1), bearer(ALICE), "content-type: application/json")
    await client.send(request_bytes("POST", OPENAI.path, None, *doubtful) + b"0\r\n\r\n" + hidden)
    response = await client.response()
    assert response.status in (400, 401)
    assert await client.rest() == b""
    assert upstream.exchanges == []


async def test_a_client_that_asks_first_is_let_go_on_with_a_key(rig: Rig, auth: Auth) -> None:
    """With a key the 100 comes as ever."""
    gateway = await rig.gateway(await rig.upstream(answer), auth=auth())
    client = await rig.client(gateway)
    body = OPENAI.body(1)
    await client.request(
        "POST", OPENAI.path, None, f"content-length: {len(body)}", "expect: 100-continue", bearer(ALICE)
    )
    assert (await client.read_head()).status == 100
    await client.send(body)
    assert (await client.response()).status == 200


@everywhere
async def test_a_preflight_needs_no_key(rig: Rig, surface: Surface, process: bool, auth: Auth) -> None:
    """R68: a browser cannot send one with OPTIONS; the call after it needs one all the same."""
    gateway = await rig.gateway(await rig.upstream(), process=process, auth=auth())
    client = await rig.client(gateway)
    asked = ("origin: http://ui.test", "access-control-request-method: POST")
    for headers in (asked, (), (*asked, bearer("wrong"))):
        await client.request("OPTIONS", surface.path, None, *headers)
        response = await client.response(to="OPTIONS")
        assert response.status not in (401, 403)
        assert response.header("allow")
    await client.post(surface.path, surface.body(1), asked[0], bearer("wrong"))
    assert (await client.response()).status == 401


async def test_probes_and_metrics_need_no_key(rig: Rig, auth: Auth) -> None:
    """They are on a listener of their own."""
    gateway = await rig.gateway(await rig.upstream(), auth=auth())
    for path in ("/livez", "/readyz", "/metrics"):
        assert (await gateway.admin(path)).status == 200


@everywhere
async def test_without_keys_whatever_is_shown_is_not_looked_at(rig: Rig, surface: Surface, process: bool) -> None:
    """``mode = "none"``: clients that insist on sending some key are served."""
    gateway = await rig.gateway(await rig.upstream(answer), process=process)
    for headers in ((), (bearer("none"),), (bearer("a"), "x-api-key: b")):
        assert (await rig.ask(gateway, surface, 1, *headers, "x-request-id: it")).status == 200
    assert "key" not in await gateway.record(request_id="it")


# -- which models ---------------------------------------------------------------------------------------------------


@everywhere
async def test_a_holder_sees_its_own_models(rig: Rig, surface: Surface, process: bool, auth: Auth) -> None:
    """Others are not on its list, and asking for one is asking for one that does not exist."""
    upstream = await rig.upstream(answer)
    options: dict[str, Any] = {"models": ["reasoning", "small"], "process": process}
    gateway = await rig.gateway(upstream, auth=auth(models=["small"]), **options)

    async def listed(key: str) -> str:
        client = await rig.client(gateway)
        await client.request("GET", surface.models_path, None, bearer(key))
        return (await client.response()).body.decode()

    assert ("reasoning" in await listed(ALICE), "small" in await listed(ALICE)) == (True, True)
    assert ("reasoning" in await listed(BOB), "small" in await listed(BOB)) == (False, True)
    assert (await rig.ask(gateway, surface, 1, bearer(BOB), model="small")).status == 200
    refused = [await rig.ask(gateway, surface, 2, bearer(BOB), model=model) for model in ("reasoning", "nosuchone")]
    assert [response.status for response in refused] == [404, 404]
    one, other = (told(response)[1] for response in refused)
    assert one.replace(b"reasoning", b"nosuchone") == other
    assert upstream.tags == [1]
    record = await gateway.record(outcome="model_not_found", model="reasoning")
    assert record["key"] == "bob"


@pytest.mark.parametrize("surface", SURFACES[:2], ids=lambda surface: surface.name)
async def test_a_single_model_that_is_not_a_holders(rig: Rig, surface: Surface, auth: Auth) -> None:
    """Nor can it be looked up by its name."""
    gateway = await rig.gateway(await rig.upstream(), models=["reasoning", "small"], auth=auth(models=["small"]))
    client = await rig.client(gateway)
    for key, model, status in ((ALICE, "reasoning", 200), (BOB, "small", 200), (BOB, "reasoning", 404)):
        await client.request("GET", f"{surface.models_path}/{model}", None, bearer(key))
        assert (await client.response()).status == status


async def test_an_alias_is_a_name_of_its_own(rig: Rig, auth: Auth) -> None:
    """Whoever may use an alias may not, by that alone, name the model behind it, nor the other way round."""
    table = auth(models=["little"])
    gateway = await rig.gateway(await rig.upstream(answer), models=["small"], aliases={"little": "small"}, auth=table)
    assert (await rig.ask(gateway, OPENAI, 1, bearer(BOB), model="little")).status == 200
    assert (await rig.ask(gateway, OPENAI, 1, bearer(BOB), model="small")).status == 404


# -- what goes upstream ---------------------------------------------------------------------------------------------


@everywhere
async def test_the_upstream_gets_the_gateways_own(
    rig: Rig, surface: Surface, process: bool, auth: Auth, secret: Callable[[str, str], str]
) -> None:
    """R61: a bearer token of its own, and of the client's key not a byte."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, process=process, auth=auth(), credential_file=secret("upstream", UPSTREAM))
    await rig.ask(gateway, surface, 1, bearer(ALICE))
    await rig.ask(gateway, surface, 2, f"x-api-key: {ALICE}")
    for exchange in upstream.exchanges:
        assert exchange.request.header("authorization") == f"Bearer {UPSTREAM}"
        assert ALICE.encode() not in exchange.request.raw


@everywhere
async def test_an_upstream_without_a_credential_gets_none(
    rig: Rig, surface: Surface, process: bool, auth: Auth
) -> None:
    """Not the client's either."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, process=process, auth=auth())
    await rig.ask(gateway, surface, 1, bearer(ALICE), f"x-api-key: {ALICE}")
    (exchange,) = upstream.exchanges
    names = {name for name, _ in exchange.request.headers}
    assert not names & {"authorization", "x-api-key", "proxy-authorization", "cookie"}
    assert ALICE.encode() not in exchange.request.raw


async def test_each_upstream_gets_its_own(rig: Rig, secret: Callable[[str, str], str]) -> None:
    """And the question for its models comes with it, too."""
    upstream, other = await rig.upstream(answer), await rig.upstream(answer)
    gateway = await rig.gateway(
        upstream,
        others={"other": upstream_table(other.url, models=["other"])},
        server={"models_refresh_seconds": 1000},
        credential_file=secret("upstream", UPSTREAM),
    )
    assert (await upstream.exchange(0)).request.header("authorization") == f"Bearer {UPSTREAM}"
    assert (await other.exchange(0)).request.header("authorization") is None
    await rig.ask(gateway, OPENAI, 1, model="other")
    assert (await other.tagged(1)).request.header("authorization") is None


@pytest.mark.parametrize("status", [401, 403])
async def test_an_upstream_that_does_not_take_the_gateways_own(
    rig: Rig, status: int, secret: Callable[[str, str], str]
) -> None:
    """It is the gateway's fault and no 401 for the client, whose key is good; what the upstream says stays here."""
    upstream = await rig.upstream(lambda exchange: exchange.answer(UPSTREAM.encode(), status=status))
    gateway = await rig.gateway(upstream, credential_file=secret("upstream", UPSTREAM))
    for surface in SURFACES:
        response = await rig.ask(gateway, surface, 1)
        assert response.status == 502
        assert UPSTREAM.encode() not in response.body


# -- reload ---------------------------------------------------------------------------------------------------------


@everywhere
async def test_a_key_that_is_removed(rig: Rig, surface: Surface, process: bool, auth: Auth) -> None:
    """The next request is a 401, on the same connection, too; what runs and what waits is served to its end."""
    upstream = await rig.upstream()
    table = auth()
    gateway = await rig.gateway(upstream, process=process, auth=table)
    running = await rig.post(gateway, surface, 1, bearer(ALICE), stream=True)
    waiting = await rig.post(gateway, surface, 2, bearer(ALICE))
    await gateway.waiting(1)
    first = await upstream.tagged(1)
    del table["keys"]["alice"]
    assert await gateway.reload(configuration({"reasoning": upstream_table(upstream.url)}, auth=table))
    assert (await rig.ask(gateway, surface, 3, bearer(ALICE))).status == 401
    first.stream()
    response = await running.response()
    assert (response.status, response.complete, surface.says_end(response)) == (200, True, True)
    answer(await upstream.tagged(2))
    assert (await waiting.response()).status == 200
    for client in (running, waiting):
        await client.post(surface.path, surface.body(4), bearer(ALICE))
        assert (await client.response()).status == 401


@everywhere
async def test_a_key_that_is_added(
    rig: Rig, surface: Surface, process: bool, auth: Auth, secret: Callable[[str, str], str]
) -> None:
    """It is good from the next request on, and so is another list of models for one that was there."""
    upstream = await rig.upstream(answer)
    options: dict[str, Any] = {"models": ["reasoning", "small"]}
    gateway = await rig.gateway(upstream, process=process, auth=auth(models=["small"]), **options)
    assert (await rig.ask(gateway, surface, 1, bearer("sk-carol"))).status == 401
    assert (await rig.ask(gateway, surface, 1, bearer(BOB))).status == 404
    table = auth()
    table["keys"]["carol"] = {"file": secret("carol", "sk-carol"), "models": "all", "queue_places": 1}
    assert await gateway.reload(configuration({"reasoning": upstream_table(upstream.url, **options)}, auth=table))
    for key in ("sk-carol", ALICE, BOB):
        assert (await rig.ask(gateway, surface, 1, bearer(key))).status == 200


@everywhere
async def test_a_key_that_is_changed_in_its_file(
    rig: Rig, surface: Surface, process: bool, auth: Auth, secret: Callable[[str, str], str]
) -> None:
    """Files are read again, the upstream's, too, with the same configuration; one that is broken changes nothing."""
    upstream = await rig.upstream(answer)
    table = auth()
    own = {"credential_file": secret("upstream", "sk-upstream-1")}
    gateway = await rig.gateway(upstream, process=process, auth=table, **own)
    await rig.ask(gateway, surface, 1, bearer(ALICE))
    text = configuration({"reasoning": upstream_table(upstream.url, **own)}, auth=table)
    secret("alice", "sk-alice-2")
    secret("upstream", "two\nlines")
    gateway.expect_error("the configuration is not taken: upstreams.reasoning.credential_file: ")
    assert not await gateway.reload(text)
    await rig.ask(gateway, surface, 2, bearer(ALICE))
    secret("upstream", "sk-upstream-2")
    assert await gateway.reload(text)
    assert (await rig.ask(gateway, surface, 3, bearer(ALICE))).status == 401
    await rig.ask(gateway, surface, 4, bearer("sk-alice-2"))
    shown = [exchange.request.header("authorization") for exchange in upstream.exchanges]
    assert shown == [f"Bearer sk-upstream-{number}" for number in (1, 1, 2)]


# -- the share of a queue -------------------------------------------------------------------------------------------


@everywhere
async def test_one_holder_does_not_fill_the_queue(rig: Rig, surface: Surface, process: bool, auth: Auth) -> None:
    """Its share taken, its next request is refused with a time to come back; others wait and are served in order."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process, auth=auth(queue_places=2), queue_limit=4)
    clients = [await rig.post(gateway, surface, 1, bearer(BOB))]
    first = await upstream.tagged(1)
    for number, (tag, key) in enumerate(((2, BOB), (3, ALICE), (4, BOB))):
        clients.append(await rig.post(gateway, surface, tag, bearer(key)))
        await gateway.waiting(number + 1)
    refused = await rig.ask(gateway, surface, 5, bearer(BOB), "x-request-id: share")
    assert refused.status == 503
    assert surface.code(refused) in ("queue_places_taken", None)
    assert "All 2 places that this key may occupy" in surface.error(refused)["message"]
    assert 1 <= int(refused.header("retry-after") or 0) <= 60
    assert refused.header("x-should-retry") == "true"
    record = await gateway.record(request_id="share")
    assert (record["key"], record["outcome"]) == ("bob", "queue_places_taken")
    assert await gateway.metric("aiogw_refusals_total", upstream="reasoning", reason="queue_places_taken") == 1

    clients.append(await rig.post(gateway, surface, 6, bearer(ALICE)))
    await gateway.waiting(4)
    answer(first)
    for tag in (2, 3, 4, 6):
        answer(await upstream.tagged(tag))
    for client in clients:
        assert (await client.response()).status == 200
    assert upstream.tags == [1, 2, 3, 4, 6]


@everywhere
async def test_a_share_is_free_again_when_who_waits_leaves(
    rig: Rig, surface: Surface, process: bool, auth: Auth
) -> None:
    """Whoever leaves the queue has taken nothing along."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process, auth=auth(queue_places=1))
    running = await rig.post(gateway, surface, 1, bearer(BOB))
    first = await upstream.tagged(1)
    for tag in range(2, 6):
        waiting = await rig.post(gateway, surface, tag, bearer(BOB))
        await gateway.waiting(1)
        assert (await rig.ask(gateway, surface, 9, bearer(BOB))).status == 503
        waiting.close()
        await gateway.waiting(0)
    answer(first)
    assert (await running.response()).status == 200


# -- TLS ------------------------------------------------------------------------------------------------------------


@needs_openssl
@everywhere
async def test_an_upstream_behind_tls(
    rig: Rig, surface: Surface, process: bool, tmp_path: Path, secret: Callable[[str, str], str]
) -> None:
    """With a CA of its own by file: whole and streamed answers, over kept connections, with the credential inside."""
    certificate = make_certificate(tmp_path)
    upstream = await rig.upstream(answer, certificate=certificate)
    gateway = await rig.gateway(
        upstream, process=process, ca_file=str(certificate[0]), credential_file=secret("upstream", UPSTREAM)
    )
    for number, stream in enumerate((False, True, False)):
        response = await rig.ask(gateway, surface, number, stream=stream)
        assert (response.status, surface.text(response)) == (200, TEXT)
    assert len(upstream.connections) == 1
    assert upstream.exchanges[0].request.header("authorization") == f"Bearer {UPSTREAM}"


@needs_openssl
@pytest.mark.parametrize("process", [False, True], ids=["in-process", "daemon"])
@pytest.mark.parametrize("wrong", ["ca", "name", "expected-by-the-system"])
async def test_an_upstream_that_is_not_who_it_should_be(
    rig: Rig, process: bool, wrong: str, tmp_path: Path, secret: Callable[[str, str], str]
) -> None:
    """Another CA, or another name: it is unavailable, and has not seen a byte of a request or of the credential."""
    certificate = make_certificate(tmp_path, "elsewhere" if wrong == "name" else "localhost")
    upstream = await rig.upstream(answer, certificate=certificate)
    (tmp_path / "other").mkdir()
    trusted = {"ca": make_certificate(tmp_path / "other"), "name": certificate}.get(wrong)
    files = {"credential_file": secret("upstream", UPSTREAM)} | ({"ca_file": str(trusted[0])} if trusted else {})
    gateway = await rig.gateway(upstream, process=process, **files)
    response = await rig.ask(gateway, OPENAI, 1)
    assert (response.status, OPENAI.code(response)) == (503, "upstream_unavailable")
    assert "certificate is not valid" in OPENAI.error(response)["message"]
    assert upstream.exchanges == []
    assert [connection.received for connection in upstream.connections] in ([], [0])
