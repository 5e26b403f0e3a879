"""Raw requests of every doubtful kind, each with what has to become of it; what the upstream may see is what counts.

A case is the bytes of one connection.  What comes of them is either *refused* (a status, and nothing at the upstream),
*forwarded* (exactly one well-formed request at the upstream), *answered* (here, without an upstream) or *closed* (no
answer, nothing at the upstream).  ``pure`` says what holds for aiohttp's pure-Python parser where it is of another
opinion than the C parser; both opinions have to be safe, so there are few.

The kinds are those of the public collections (RFC 9112's own rules, http-garden, Http11Probe, http-desync-guardian,
h1spec); the bytes are written for this gateway.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

CHAT = b"/v1/chat/completions"
BODY = b'{"model":"reasoning","messages":[{"role":"user","content":"tag:7"}]}'
MESSAGES = b"/llm/v1/messages"
# Of one length with BODY's header lines, so that a desynchronised reader would take it for a request.
SMUGGLED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
# The limits of the gateway under test, so that cases can lie on both sides of them.
MAX_BODY_BYTES = 1 << 16
MAX_FIELD_BYTES = 32768
MAX_FIELDS = 128


@dataclass(frozen=True)
class Outcome:
    """``statuses`` of the final responses in their order, and the bodies that go up.  ``closes``: None is either."""

    statuses: tuple[int, ...] = ()
    forwarded: tuple[bytes, ...] = ()
    closes: bool | None = None


@dataclass(frozen=True)
class Case:
    """``raw`` is sent piece by piece: each but the first one only when a 100 (Continue) has been read.

    A client that expects no answer ends its side of the connection behind it, or it would be waited for.
    """

    name: str
    raw: tuple[bytes, ...]
    outcome: Outcome
    pure: Outcome


CLOSED = Outcome(closes=True)
FORWARDED = Outcome(statuses=(200,), forwarded=(BODY,))
# And what may come behind it is not looked at.
LAST_ONE = replace(FORWARDED, closes=True)


def refused(status: int = 400, *, closes: bool | None = None) -> Outcome:
    return Outcome(statuses=(status,), closes=closes)


# Framing that is in doubt, or no HTTP at all: the connection cannot go on.
BAD = refused(400, closes=True)


def forwarded(body: bytes = BODY) -> Outcome:
    return replace(FORWARDED, forwarded=(body,))


def case(name: str, raw: bytes | tuple[bytes, ...], outcome: Outcome, *, pure: Outcome | None = None) -> Case:
    return Case(name, (raw,) if isinstance(raw, bytes) else raw, outcome, pure or outcome)


def post(
    *lines: bytes,
    line: bytes = b"POST /v1/chat/completions HTTP/1.1",
    host: bytes | None = b"host: a",
    body: bytes = BODY,
    length: bool = True,
    end: bytes = b"\r\n",
) -> bytes:
    """A request that is fine apart from what is given."""
    head = [line, *([host] if host is not None else []), *lines]
    if length:
        head.append(b"content-length: %d" % len(body))
    return end.join([*head, b"", b""]) + body


def shown(data: bytes) -> str:
    """``data`` as the name of a case."""
    text = ascii(data.decode("latin-1"))[1:-1]
    return text if len(text) <= 70 else f"{text[:40]}...{text[-20:]} ({len(data)})"


def each(
    kind: str, made: Iterable[tuple[bytes, bytes]], outcome: Outcome, *, pure: Outcome | None = None
) -> list[Case]:
    """Cases with one outcome; ``made`` is what gives each its name, and its bytes."""
    return [case(f"{kind}: {shown(name)}", raw, outcome, pure=pure) for name, raw in made]


def lines(*given: bytes) -> Iterable[tuple[bytes, bytes]]:
    """Each as one more header line of a request that is otherwise fine."""
    return [(one, post(one)) for one in given]


def request_lines(*given: bytes) -> Iterable[tuple[bytes, bytes]]:
    return [(one, post(line=one)) for one in given]


def targets(*given: bytes) -> Iterable[tuple[bytes, bytes]]:
    return [(one, post(line=b"POST " + one + b" HTTP/1.1")) for one in given]


def framed_by(*given: bytes, body: bytes = BODY) -> Iterable[tuple[bytes, bytes]]:
    """Each instead of the Content-Length."""
    return [(one, post(one, length=False, body=body)) for one in given]


def chunked(*given: bytes) -> Iterable[tuple[bytes, bytes]]:
    """Each as the whole chunked body."""
    return [(one, post(b"transfer-encoding: chunked", length=False, body=one)) for one in given]


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


LAST = b"0\r\n\r\n"
WHOLE = chunk(BODY) + LAST

# -- what is fine ---------------------------------------------------------------------------------------------------

FINE = [
    case("plain", post(), FORWARDED),
    case("lower-case fields", post(b"content-type: application/json"), FORWARDED),
    case("upper-case fields", post(b"CONTENT-TYPE: APPLICATION/JSON", host=b"HOST: A"), FORWARDED),
    case("no space behind the colon", post(b"accept:*/*", host=b"host:a"), FORWARDED),
    case("spaces around a value", post(b"accept: \t */* \t ", host=b"host:  a  "), FORWARDED),
    case("an empty value", post(b"accept:"), FORWARDED),
    case("a line break before", b"\r\n" + post(), FORWARDED),
    case("two line breaks before", b"\r\n\r\n" + post(), FORWARDED),
    case("HTTP/1.0", post(line=b"POST /v1/chat/completions HTTP/1.0"), LAST_ONE),
    case("HTTP/1.0, no Host", post(line=b"POST /v1/chat/completions HTTP/1.0", host=None), FORWARDED),
    case("chunked", post(b"transfer-encoding: chunked", length=False, body=WHOLE), FORWARDED),
    case("models", post(line=b"GET /v1/models HTTP/1.1", body=b"", length=False), Outcome(statuses=(200,))),
    case("models, HEAD", post(line=b"HEAD /v1/models HTTP/1.1", body=b"", length=False), Outcome(statuses=(200,))),
    case("models with a body", post(line=b"GET /v1/models HTTP/1.1", body=SMUGGLED), Outcome(statuses=(200,))),
    case("another surface", post(line=b"POST /llm/v1/messages HTTP/1.1"), refused(400)),
]

# -- the request line -----------------------------------------------------------------------------------------------

REQUEST_LINE = [
    *each(
        "request line",
        request_lines(
            b"POST\t/v1/chat/completions HTTP/1.1",
            b"POST /v1/chat/completions\tHTTP/1.1",
            b"POST /v1/chat completions HTTP/1.1",
            b"POST /v1/chat/completions HTTP/1.1 ",
            b"POST /v1/chat/completions HTTP/1.1 x",
            b" POST /v1/chat/completions HTTP/1.1",
            b"\tPOST /v1/chat/completions HTTP/1.1",
            b"POST /v1/chat/completions http/1.1",
            b"POST /v1/chat/completions HTTP/1,1",
            b"POST /v1/chat/completions HTTP/1.1.1",
            b"POST /v1/chat/completions HTTP/11",
            b"POST /v1/chat/completions HTTP/1.",
            b"POST /v1/chat/completions HTTP/.1",
            b"POST /v1/chat/completions HTTP/1.10",
            b"POST /v1/chat/completions HTTP/01.1",
            b"POST /v1/chat/completions HTTP/+1.1",
            b"POST /v1/chat/completions HTTP/1.-1",
            b"POST /v1/chat/completions HTTP/ 1.1",
            b"POST /v1/chat/completions HTTP /1.1",
            b"POST /v1/chat/completions HTTP",
            b"POST /v1/chat/completions HTTPS/1.1",
            b"POST /v1/chat/completions ICE/1.0",
            b"POST /v1/chat/completions \xef\xbc\x91.1",
            b"POST /v1/chat/completions HTTP/\xd9\xa1.1",
            b"POST /v1/chat/completions",
            b"POST",
            b"/v1/chat/completions HTTP/1.1",
            b"POST HTTP/1.1",
            b"POST  HTTP/1.1",
            b"\x00POST /v1/chat/completions HTTP/1.1",
            b"POST\x00 /v1/chat/completions HTTP/1.1",
            b"\xef\xbb\xbfPOST /v1/chat/completions HTTP/1.1",
            b"P@ST /v1/chat/completions HTTP/1.1",
            b"P(ST /v1/chat/completions HTTP/1.1",
            b"\xc3\xa9 /v1/chat/completions HTTP/1.1",
        ),
        BAD,
    ),
    # The C parser does not mind.
    *each(
        "request line",
        request_lines(b"POST  /v1/chat/completions HTTP/1.1", b"POST /v1/chat/completions  HTTP/1.1"),
        FORWARDED,
        pure=BAD,
    ),
    *each(
        "request line",
        request_lines(b"POST /v1/chat/completions RTSP/1.0"),
        LAST_ONE,
        pure=BAD,
    ),
    *each(
        "version",
        request_lines(
            *(
                b"POST /v1/chat/completions HTTP/" + version
                for version in (b"0.0", b"0.9", b"1.2", b"1.9", b"2.0", b"2.1", b"3.0", b"9.9")
            )
        ),
        BAD,
    ),
    case("version: HTTP/0.9", b"GET /v1/models\r\n\r\n", BAD),
    case("version: HTTP/0.9 with a Host", b"GET /v1/models\r\nhost: a\r\n\r\n", BAD),
    case("version: HTTP/0.9 POST", post(line=b"POST /v1/chat/completions"), BAD),
    case("version: HTTP/0.9 without an end", b"GET /v1/models\r\n", CLOSED),
    case("line end: LF only", post(end=b"\n"), BAD),
    case("line end: CR only", post(end=b"\r") + b"\r\n", BAD, pure=CLOSED),
    case("line end: LF in the request line", post().replace(b"HTTP/1.1\r\n", b"HTTP/1.1\n", 1), BAD),
    case("line end: LF behind a field", post(b"x: y\nz: q"), BAD),
    case("line end: LF before the body", post().replace(b"\r\n\r\n", b"\r\n\n", 1), BAD),
    case("line end: CR CR LF", post(end=b"\r\r\n"), BAD, pure=CLOSED),
    case("line end: LF CR", post(end=b"\n\r"), BAD, pure=CLOSED),
]

# -- methods --------------------------------------------------------------------------------------------------------

METHODS = [
    *each(
        "method",
        [
            (method, post(line=method + b" /v1/chat/completions HTTP/1.1"))
            for method in (b"GET", b"HEAD", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"TRACE", b"PROPFIND", b"REPORT")
        ],
        refused(405),
    ),
    # A method nobody knows is no HTTP to the C parser, and just a method that is not allowed to the other one.
    *each(
        "method",
        [
            (method, post(line=method + b" /v1/chat/completions HTTP/1.1"))
            for method in (b"BREW", b"X", b"POSTX", b"XPOST", b"A!#$%&'*+-.^_`|~9", b"TRACK", b"DEBUG")
        ],
        BAD,
        pure=refused(405),
    ),
    # RFC 9110 has methods in their own case; the pure parser has none.
    *each(
        "method",
        [(method, post(line=method + b" /v1/chat/completions HTTP/1.1")) for method in (b"post", b"Post", b"pOsT")],
        BAD,
        pure=FORWARDED,
    ),
    case(
        "preflight",
        post(
            b"origin: https://evil.test",
            b"access-control-request-method: POST",
            line=b"OPTIONS /v1/chat/completions HTTP/1.1",
            body=b"",
        ),
        refused(405, closes=False),
    ),
    case(
        "preflight of messages",
        post(b"origin: null", line=b"OPTIONS /llm/v1/messages HTTP/1.1", body=b"", length=False),
        refused(405, closes=False),
    ),
    case("a long method", post(line=b"X" * 20000 + b" /v1/models HTTP/1.1", body=b""), BAD, pure=refused(405)),
    case("OPTIONS *", post(line=b"OPTIONS * HTTP/1.1", body=b"", length=False), refused(404)),
    case("TRACE with secrets", post(b"cookie: a=b", line=b"TRACE /v1/models HTTP/1.1"), refused(405)),
    case("POST *", post(line=b"POST * HTTP/1.1"), BAD),
    case(
        "CONNECT to a host", b"CONNECT evil.test:443 HTTP/1.1\r\nhost: evil.test:443\r\n\r\n", refused(404, closes=True)
    ),
    case("CONNECT and a tunnel", b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n" + SMUGGLED, refused(404, closes=True)),
    case("CONNECT to a path", b"CONNECT /v1/chat/completions HTTP/1.1\r\nhost: a\r\n\r\n", refused(404, closes=True)),
    case("HEAD of what is POST", post(line=b"HEAD /llm/v1/messages HTTP/1.1", body=b"", length=False), refused(405)),
    case("HEAD of nothing", post(line=b"HEAD /v1/nothing HTTP/1.1", body=b"", length=False), refused(404)),
]

# -- targets --------------------------------------------------------------------------------------------------------

TARGETS = [
    # Wherever the target says it leads, the path is looked up in a closed table and the address is the configured one.
    *each(
        "target",
        targets(
            b"/v1/chat/completions?",
            b"/v1/chat/completions?x=1",
            b"/v1/chat/completions?api-version=2024-06-01&model=other",
            b"/v1/chat/completions?url=http://evil.test/",
            b"/v1/chat/completions?a=%00%0d%0ax:y",
            b"/v1/chat/completions?a?b?c",
            b'/v1/chat/completions?;|<>"{}`^',
            b"/v1/chat/completions?" + b"x" * 20000,
            b"/v1/chat/%63ompletions",
            b"/%76%31/chat/completions",
            b"http://evil.test/v1/chat/completions",
            b"http://evil.test:1/v1/chat/completions",
            b"https://evil.test/v1/chat/completions",
            b"HTTP://EVIL.TEST/v1/chat/completions",
            b"http://169.254.169.254/v1/chat/completions",
            b"http://127.0.0.1:22/v1/chat/completions",
            b"http://[::1]:1/v1/chat/completions",
            b"http://user:password@evil.test/v1/chat/completions",
            b"ftp://evil.test/v1/chat/completions",
            b"gopher://evil.test:70/v1/chat/completions",
            b"http://evil.test/v1/chat/completions?x=http://a/",
        ),
        FORWARDED,
    ),
    *each("target", targets(b"/v1/chat/completions?\xc3\xa9"), BAD, pure=FORWARDED),
    *each("target", targets(b"/v1/\xff\xfe", b"/v1/\xc3\xa9"), BAD, pure=refused(404)),
    *each("target", targets(b"/v1/chat/completions#x", b"/v1/chat/completions?x#y"), FORWARDED),
    *each("target", targets(b"/v1/chat%2fcompletions", b"/v1/chat%2Fcompletions"), FORWARDED),
    *each(
        "target",
        targets(
            b"/",
            b"//",
            b"/v1",
            b"/v1/",
            b"/v1/chat/completions/",
            b"/v1/chat/completions//",
            b"/v1//chat/completions",
            b"//v1/chat/completions",
            b"///v1/chat/completions",
            b"//evil.test/v1/chat/completions",
            b"/\\evil.test/v1/chat/completions",
            b"/v1/./chat/completions",
            b"/./v1/chat/completions",
            b"/v1/../v1/chat/completions",
            b"/../v1/chat/completions",
            b"/v1/chat/completions/..",
            b"/v1/chat/completions/.",
            b"/v1/%2e%2e/v1/chat/completions",
            b"/v1/%2e/chat/completions",
            b"/v1/..%2fv1/chat/completions",
            b"/v1/..;/v1/chat/completions",
            b"/v1/chat/completions;x=1",
            b"/v1/chat/completions%00",
            b"/v1/chat/completions%0d%0ax:y",
            b"/v1/chat/completions%20",
            b"/v1/chat/completions%3fx=1",
            b"/v1/chat/completions%23x",
            b"/v1/chat%252fcompletions",
            b"/v1/chat\\completions",
            b"/v1/chat%5ccompletions",
            b"/V1/CHAT/COMPLETIONS",
            b"/v1/chat/completions%",
            b"/v1/chat/completions%zz",
            b"/v1/chat/completions%c0%af",
            b"/metrics",
            b"/livez",
            b"/v1/../metrics",
            b"/llm/../v1/chat/completions",
            b"/llm/v1/chat/completions",
            b"/llmv1/messages",
            b"http://evil.test",
            b"http://evil.test/",
            b"http://evil.test//v1/chat/completions",
            b"http://evil.test?/v1/chat/completions",
            b"/" + b"x" * 20000,
            b"/" + b"/" * 20000,
            b"/" + b"%2e%2e/" * 2000,
        ),
        refused(404),
    ),
    # What is said of it is short, whatever it is.
    *each(
        "target",
        [
            (target, post(line=b"GET " + target + b" HTTP/1.1", body=b"", length=False))
            for start in (
                b"/v1/",
                b"/v1/models/",
                b"/v1/v1/",
                b"/llm/",
                b"/llm/messages",
                b"/llm/models/",
                b"/llm/v1/models/",
            )
            for target in (start + b"x" * 20000, start + b"%1b%5b31m%0d%0ax-evil:%201", start + b"%e2%80%ae%c2%85")
        ],
        refused(404),
    ),
    # Below the models, which are only read.
    *each(
        "target",
        targets(
            b"/v1/models/../chat/completions", b"/v1/models/../chat/completions/", b"/v1/models", b"/v1/models/%2e%2e"
        ),
        refused(405),
    ),
    *each(
        "target",
        targets(
            b"v1/chat/completions",
            b"evil.test/v1/chat/completions",
            b"evil.test:80",
            b"?x=1",
            b"#",
            b"http:/v1/chat/completions",
            b"http:v1/chat/completions",
            b"http:///v1/chat/completions",
            b"http://",
            b"http://?x",
            b"http://[::1/v1/chat/completions",
            b"http://[/v1/chat/completions",
            b"http://a:b/v1/chat/completions",
            b"http://a:99999/v1/chat/completions",
            b"://a/v1/chat/completions",
            b"javascript:alert(1)",
            b"/v1/chat/completions\x00",
            b"/v1/chat/completions\x01",
            b"/v1/chat/completions\x7f",
            b"/v1/chat\rx/completions",
            b"/v1/chat\x0b/completions",
            b"/" + b"x" * MAX_FIELD_BYTES * 2,
        ),
        BAD,
    ),
]

# -- Host -----------------------------------------------------------------------------------------------------------

HOSTS = [
    *each(
        "host",
        [
            (host, post(host=b"host: " + host))
            for host in (
                b"",
                b"evil.test",
                b"127.0.0.1:1",
                b"[::1]:80",
                b"evil.test@a/..",
                b"a/../..",
                b"a b",
                b"a, b",
                b"http://evil.test/",
                b"user:password@evil.test",
                b"a:99999",
                b"a:b",
                b"[",
                b"\xff\xfe",
                b"169.254.169.254",
                b"localhost#x",
                b"a?b",
            )
        ],
        FORWARDED,
    ),
    case("host: none", post(host=None), BAD),
    case("host: twice the same", post(b"host: a"), BAD),
    case("host: two", post(b"host: evil.test"), BAD),
    case("host: two, in other cases", post(b"HOST: evil.test"), BAD),
    case("host: two, the first empty", post(b"host: b", host=b"host:"), BAD),
    case("host: space before the colon", post(host=b"host : a"), BAD),
    case("host: with a NUL", post(host=b"host: a\x00b"), BAD),
    case("host: with a CR", post(host=b"host: a\rb"), BAD),
    case("host: folded", post(host=b"host: a\r\n b"), BAD),
    case("host: other than the target", post(line=b"POST http://evil.test/v1/chat/completions HTTP/1.1"), FORWARDED),
]

# -- Content-Length -------------------------------------------------------------------------------------------------

N = len(BODY)
LENGTHS = [
    *each(
        "length",
        framed_by(
            b"content-length: +%d" % N,
            b"content-length: -%d" % N,
            b"content-length: %d.0" % N,
            b"content-length: 0x%x" % N,
            b"content-length: %x" % (10 << 8 | 11),
            b"content-length: %de0" % N,
            b"content-length: %d, %d" % (N, N),
            b"content-length: %d,%d" % (N, N + 1),
            b"content-length: %d %d" % (N, N),
            b"content-length: %d;" % N,
            b"content-length: '%d'" % N,
            b'content-length: "%d"' % N,
            b"content-length: %d_0" % (N // 10),
            b"content-length: abc",
            b"content-length: NaN",
            b"content-length: \xd9\xa3",
            b"content-length: \xef\xbc\x93",
            b"content-length: \xb2",
            b"content-length: %d\x00" % N,
            b"content-length: %d\x0b" % N,
            b"content-length: -1",
            b"content-length : %d" % N,
            b"content-length\t: %d" % N,
            b" content-length: %d" % N,
            b"content-length\x00: %d" % N,
            b"content length: %d" % N,
            b"content-length:\r\n %d" % N,
            b"content-length: %d\r\ncontent-length: %d" % (N, N),
            b"content-length: %d\r\nContent-Length: %d" % (N, N + 1),
            b"content-length: 0\r\ncontent-length: %d" % N,
            b"content-length: %d\r\ncontent-length: 0" % N,
            b"content-length: %d\r\ncontent-length:" % N,
        ),
        BAD,
    ),
    *each(
        "length",
        framed_by(b"content-length: 18446744073709551616", b"content-length: 99999999999999999999999999"),
        BAD,
        pure=refused(413),
    ),
    case("length: with zeros before", post(b"content-length: 0000%d" % N, length=False), FORWARDED),
    case("length: spaces around", post(b"content-length: \t%d \t" % N, length=False), FORWARDED),
    case("length: nothing", post(b"content-length:", length=False), BAD),
    case("length: zero and a request behind", post(body=b"") + SMUGGLED, Outcome((400, 200), (BODY,))),
    case("length: none and a request behind", post(body=b"", length=False) + SMUGGLED, Outcome((400, 200), (BODY,))),
    case("length: none and a body behind", post(length=False) + b"\r\n\r\n", BAD),
    case("length: too short", post(b"content-length: %d" % (N - 1), length=False) + b"\r\n\r\n", BAD),
    case("length: too long", post(b"content-length: %d" % (N + 1), length=False), CLOSED),
    case("length: a head without its body", post(b"content-length: 5", length=False, body=b""), CLOSED),
    case("length: under another name", post(b"content_length: 5", b"x-content-length: 5"), FORWARDED),
    case("length: over the limit", post(b"content-length: %d" % (MAX_BODY_BYTES + 1), length=False), refused(413)),
    case("length: far over the limit", post(b"content-length: 1%b" % (b"0" * 18), length=False), refused(413)),
    case("length: the largest of 64 bits", post(b"content-length: 18446744073709551615", length=False), refused(413)),
]

# -- Transfer-Encoding ----------------------------------------------------------------------------------------------

CODINGS = [
    *each(
        "coding",
        framed_by(
            b"transfer-encoding: identity",
            b"transfer-encoding: gzip",
            b"transfer-encoding: gzip, chunked",
            b"transfer-encoding: deflate, chunked",
            b"transfer-encoding: identity, chunked",
            b"transfer-encoding: chunked, identity",
            b"transfer-encoding: chunked, chunked",
            b"transfer-encoding: chunked, gzip",
            b"transfer-encoding: chunkedx",
            b"transfer-encoding: xchunked",
            b"transfer-encoding: x-chunked",
            b"transfer-encoding: chunk",
            b"transfer-encoding: chunked;q=1",
            b"transfer-encoding: 'chunked'",
            b'transfer-encoding: "chunked"',
            b"transfer-encoding: \x0bchunked",
            b"transfer-encoding: chunked\x0c",
            b"transfer-encoding: chunked\x00",
            b"transfer-encoding: chun\xc4\xb8ed",
            b"transfer-encoding: \xe2\x84\xaahunked",
            b"transfer-encoding:",
            b"transfer-encoding: ,",
            b"transfer-encoding: chunked,",
            b"transfer-encoding: , chunked",
            b"transfer-encoding: chunked\r\ntransfer-encoding: chunked",
            b"transfer-encoding: chunked\r\ntransfer-encoding: identity",
            b"transfer-encoding: identity\r\ntransfer-encoding: chunked",
            b"transfer-encoding : chunked",
            b"transfer-encoding\t: chunked",
            b" transfer-encoding: chunked",
            b"transfer-encoding:\r\n chunked",
            b"transfer-encoding: chunked\r\n x",
            b"x: y\r\n transfer-encoding: chunked",
            b"x: y\rtransfer-encoding: chunked",
            b"x: y\ntransfer-encoding: chunked",
            b"transfer-encoding: chunked\r\ncontent-length: %d" % len(WHOLE),
            b"content-length: %d\r\ntransfer-encoding: chunked" % len(WHOLE),
            b"content-length: 4\r\ntransfer-encoding: chunked",
            b"content-length: 0\r\ntransfer-encoding: chunked",
            b"content-length: %d\r\ntransfer-encoding: xchunked" % len(WHOLE),
            b"content-length: %d\r\ntransfer-encoding : chunked" % len(WHOLE),
            b"content-length: %d\r\ntransfer-encoding:" % len(WHOLE),
            b"content-length: %d\r\ntransfer-encoding: identity" % len(WHOLE),
            body=WHOLE,
        ),
        BAD,
    ),
    *each(
        "coding",
        framed_by(
            b"Transfer-Encoding: Chunked",
            b"TRANSFER-ENCODING: CHUNKED",
            b"transfer-encoding:chunked",
            body=WHOLE,
        ),
        FORWARDED,
    ),
    *each("coding", framed_by(b"transfer-encoding: \t chunked \t", body=WHOLE), BAD, pure=FORWARDED),
    case("coding: under another name", post(b"transfer_encoding: chunked", b"x-transfer-encoding: chunked"), FORWARDED),
    case("coding: TE", post(b"te: trailers, chunked", b"connection: te"), FORWARDED),
    case(
        "coding: HTTP/1.0",
        post(b"transfer-encoding: chunked", line=b"POST /v1/chat/completions HTTP/1.0", length=False, body=WHOLE),
        BAD,
    ),
    case(
        "coding: CL.TE",
        post(b"content-length: 6", b"transfer-encoding: chunked", length=False, body=LAST + b"G"),
        BAD,
    ),
    case(
        "coding: TE.CL",
        post(
            b"content-length: 4",
            b"transfer-encoding: chunked",
            length=False,
            body=b"%x\r\n%b\r\n%b" % (len(SMUGGLED), SMUGGLED, LAST),
        ),
        BAD,
    ),
    case(
        "coding: on a GET",
        post(b"transfer-encoding: gzip, chunked", line=b"GET /v1/models HTTP/1.1", length=False, body=WHOLE),
        BAD,
    ),
]

# -- chunks ---------------------------------------------------------------------------------------------------------

GOOD_CHUNKS = (
    WHOLE,
    chunk(BODY[:1]) + chunk(BODY[1:2]) + chunk(BODY[2:]) + LAST,
    b"".join(chunk(BODY[place : place + 1]) for place in range(N)) + LAST,
    chunk(BODY, b";x=1") + LAST,
    chunk(BODY, b';x="a;b"') + LAST,
    chunk(BODY, b";x") + b"0;y=z\r\n\r\n",
    chunk(BODY) + b"0\r\nx-trailer: 1\r\n\r\n",
    chunk(BODY) + b"0\r\nauthorization: canary\r\nx-y: z\r\n\r\n",
    chunk(BODY) + b"000\r\n\r\n",
    b"0%X\r\n%b\r\n%b" % (N, BODY, LAST),
    b"000000%x\r\n%b\r\n%b" % (N, BODY, LAST),
)
BAD_CHUNKS = (
    b"0x%x\r\n%b\r\n%b" % (N, BODY, LAST),
    b"+%x\r\n%b\r\n%b" % (N, BODY, LAST),
    b"-%x\r\n%b\r\n%b" % (N, BODY, LAST),
    b"%x_0\r\n%b\r\n%b" % (N // 16, BODY, LAST),
    b"zz\r\n%b\r\n%b" % (BODY, LAST),
    b"\r\n%b\r\n%b" % (BODY, LAST),
    b";x\r\n%b\r\n%b" % (BODY, LAST),
    b" %x\r\n%b\r\n%b" % (N, BODY, LAST),
    b"\xd9\xa4\r\n%b\r\n%b" % (BODY, LAST),
    b"%x\n%b\r\n%b" % (N, BODY, LAST),
    b"%x\r%b\r\n%b" % (N, BODY, LAST),
    b"%x\r\n%b\n%b" % (N, BODY, LAST),
    b"%x\r\n%bxx%b" % (N, BODY, LAST),
    b"%x\r\n%b\r\n%b" % (N - 1, BODY, LAST),
    b"%x\r\n%b%b" % (N, BODY, LAST),
    b"%x;a\nb\r\n%b\r\n%b" % (N, BODY, LAST),
    b"%x\x00\r\n%b\r\n%b" % (N, BODY, LAST),
    chunk(BODY) + b"-0\r\n\r\n",
    chunk(BODY) + b"0x0\r\n\r\n",
    chunk(BODY) + b"0\r\nx\r\n\r\n",
    chunk(BODY) + b"0\r\n: y\r\n\r\n",
    chunk(BODY) + b"0\r\nx : y\r\n\r\n",
    chunk(BODY) + b"0\r\nx: a\x00b\r\n\r\n",
    chunk(BODY) + b"0\r\nx: a\n\r\n\r\n",
    chunk(BODY) + b"0\r\n y: z\r\n\r\n",
)
CHUNKS = [
    *each("chunks", chunked(*GOOD_CHUNKS), LAST_ONE),
    *each("chunks", chunked(*BAD_CHUNKS), BAD),
    # And where the head has been understood and its body is being read when the fault comes.
    *each(
        "chunks after 100",
        [
            (body, (post(b"transfer-encoding: chunked", b"expect: 100-continue", length=False, body=b""), body))
            for body in GOOD_CHUNKS
        ],
        FORWARDED,
    ),
    *each(
        "chunks after 100",
        [
            (body, (post(b"transfer-encoding: chunked", b"expect: 100-continue", length=False, body=b""), body))
            for body in BAD_CHUNKS
        ],
        BAD,
    ),
    # The pure parser knows larger numbers, and waits for as many bytes.
    case(
        "chunks: more than 64 bits",
        post(b"transfer-encoding: chunked", length=False, body=b"11111111111111111\r\n%b\r\n%b" % (BODY, LAST)),
        BAD,
        pure=CLOSED,
    ),
    case("chunks: no last one", post(b"transfer-encoding: chunked", length=False, body=chunk(BODY)), CLOSED),
    case(
        "chunks: half a last one",
        post(b"transfer-encoding: chunked", length=False, body=chunk(BODY) + b"0\r\n"),
        CLOSED,
    ),
    case("chunks: half a chunk", post(b"transfer-encoding: chunked", length=False, body=b"ff\r\n{}"), CLOSED),
    case("chunks: the largest", post(b"transfer-encoding: chunked", length=False, body=b"f" * 16 + b"\r\n{}"), CLOSED),
    case(
        "chunks: a trailer that is a Host",
        post(b"transfer-encoding: chunked", length=False, body=chunk(BODY) + b"0\r\nhost: evil.test\r\n\r\n"),
        LAST_ONE,
    ),
    # aiohttp's C parser (3.14) would make it a field of the second request.
    case(
        "chunks: a trailer, and a request behind",
        post(b"transfer-encoding: chunked", length=False, body=chunk(BODY) + b"0\r\nx-request-id: evil\r\n\r\n")
        + SMUGGLED,
        LAST_ONE,
    ),
    case("chunks: none", post(b"transfer-encoding: chunked", length=False, body=LAST), refused(400)),
    case(
        "chunks: a request behind",
        post(b"transfer-encoding: chunked", length=False, body=WHOLE) + SMUGGLED,
        LAST_ONE,
    ),
    case(
        "chunks: too many bytes",
        post(b"transfer-encoding: chunked", length=False, body=chunk(b" " * (MAX_BODY_BYTES + 1)) + LAST),
        refused(413),
    ),
    case(
        "chunks: an extension without end",
        post(b"transfer-encoding: chunked", length=False, body=b"1;" + b"x" * MAX_FIELD_BYTES * 20),
        CLOSED,
        pure=BAD,
    ),
    case(
        "chunks: a trailer too long",
        post(b"transfer-encoding: chunked", length=False, body=chunk(BODY) + b"0\r\nx: " + b"y" * MAX_FIELD_BYTES * 20),
        BAD,
    ),
    case(
        "chunks: too many trailers",
        post(b"transfer-encoding: chunked", length=False, body=chunk(BODY) + b"0\r\n" + b"x: y\r\n" * 200 + b"\r\n"),
        BAD,
    ),
]

# -- fields ---------------------------------------------------------------------------------------------------------

FIELDS = [
    *each(
        "field",
        lines(
            b"x : y",
            b"x\t: y",
            b" x: y",
            b"\tx: y",
            b": y",
            b"x",
            b"x y: z",
            b"x\x00y: z",
            b"x\x01: z",
            b"x\x7f: z",
            b"x\xc3\xa9: z",
            b"x\xff: z",
            b"x(y): z",
            b"x,y: z",
            b"x/y: z",
            b"x@y: z",
            b"x[y]: z",
            b"x=y",
            b'"x": y',
            b"{x}: y",
            b"x: a\x00b",
            b"x: a\x01b",
            b"x: a\x08b",
            b"x: a\x0bb",
            b"x: a\x0cb",
            b"x: a\x1bb",
            b"x: a\x1fb",
            b"x: a\x7fb",
            b"x: a\rb",
            b"x: a\r\r\nb: c",
            b"x: y\r\n z",
            b"x: y\r\n\tz",
            b"user-agent: a\r\n b",
            b"user-agent: a\x1b[31mb",
            b"user-agent: a\r\nuser-agent: b",
            b"content-type: a\r\ncontent-type: b",
            b"x: " + b"y" * (MAX_FIELD_BYTES + 1),
            b"y" * (MAX_FIELD_BYTES + 1) + b": x",
            b"cookie: " + b"y" * MAX_FIELD_BYTES * 2,
        ),
        BAD,
    ),
    *each(
        "field",
        lines(
            b"x: a\tb",
            b"x: \xff\xfe",
            b"x: caf\xc3\xa9",
            b"x: \xc2\x85\xe2\x80\xa8",
            b"user-agent: \xff\xfe\x80",
            b"user-agent: caf\xc3\xa9",
            b"user-agent: " + b"x" * 20000,
            b"user-agent: ${jndi:ldap://evil.test/a}",
            b"user-agent: %0d%0ax-evil: 1",
            b"accept: */*\r\naccept: text/html",
            b"accept: \x80",
            b"x-request-id: a b\tc",
            b"x-request-id: " + b"a" * 10000,
            b'x-request-id: "; DROP TABLE',
            b"x-request-id: \xc3\xa9",
            b"traceparent: \xff",
            b"baggage: a=b\r\nbaggage: c=d",
            b"content-type: text/plain",
            b"content-type: nonsense",
            b"content-type: application/json\xff",
            b"content-type:",
            b"!#$%&'*+-.^_`|~9: x",
            b"x: y:z::",
            b"cookie: " + b"y" * 20000,
            b"x" * 200 + b": y",
        ),
        FORWARDED,
    ),
    case("field: as many as are allowed", post(*(b"x-%d: y" % n for n in range(MAX_FIELDS - 4))), FORWARDED),
    case("field: more than are allowed", post(*(b"x-%d: y" % n for n in range(MAX_FIELDS))), BAD),
    case("field: thousands", post(*(b"x: y" for _ in range(5000))), BAD),
    case("field: no end of the head", b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nx: y\r\n", CLOSED),
    case("field: half a name", b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nconte", CLOSED),
    case("field: half a request line", b"POST /v1/chat/comp", CLOSED),
    case("field: nothing at all", b"", CLOSED),
    case("field: line breaks only", b"\r\n\r\n\r\n", CLOSED),
    case("field: old websockets", post(b"sec-websocket-key1: 1"), BAD),
]

# -- what stays on this side ----------------------------------------------------------------------------------------

HOP_BY_HOP = each(
    "hop by hop",
    lines(
        b"connection: keep-alive",
        b"connection: Keep-Alive, x",
        b"connection: x, y, z\r\nx: 1\r\ny: 2\r\nz: 3",
        b"connection: content-type",
        b"connection: content-length",
        b"connection: host",
        b"connection: transfer-encoding",
        b"connection: authorization\r\nauthorization: Bearer canary",
        b"connection: x-request-id",
        b"connection: \xff",
        b"connection:",
        b"connection: keep-alive\r\nconnection: x",
        b"keep-alive: timeout=5, max=1000",
        b"proxy-connection: keep-alive",
        b"proxy-authenticate: Basic",
        b"proxy-authorization: Basic canary",
        b"te: trailers",
        b"te: gzip;q=1",
        b"trailer: x-checksum",
        b"upgrade-insecure-requests: 1",
        b"authorization: Bearer canary",
        b"x-api-key: canary",
        b"cookie: canary",
        b"set-cookie: canary",
        b"x-forwarded-for: 127.0.0.1",
        b"x-forwarded-host: evil.test",
        b"x-forwarded-proto: https",
        b"x-real-ip: 127.0.0.1",
        b"forwarded: for=127.0.0.1;host=evil.test",
        b"via: 1.1 evil.test",
        b"x-original-url: /metrics",
        b"x-rewrite-url: /metrics",
        b"x-http-method-override: DELETE",
        b"x-host: evil.test",
        b"x-accel-redirect: /etc/passwd",
        b"x-sendfile: /etc/passwd",
        b"max-forwards: 0",
        b"range: bytes=0-1",
        b"if-none-match: *",
        b"accept-encoding: gzip, br",
        b"origin: https://evil.test",
        b"referer: https://evil.test/?canary",
        b"http2-settings: AAMAAABkAARAAAAAAAIAAAAA",
        b"sec-websocket-key: x",
        b"x-aiogw-upstream: evil.test",
        b"x-data-parallel-rank: 1",
    ),
    FORWARDED,
)

# -- Expect ---------------------------------------------------------------------------------------------------------

EXPECT = [
    case("expect: 100 and the body behind it", (post(b"expect: 100-continue").removesuffix(BODY), BODY), FORWARDED),
    case("expect: 100 and the body with it", (post(b"expect: 100-continue"), b""), FORWARDED),
    case("expect: upper case", (post(b"EXPECT: 100-CONTINUE").removesuffix(BODY), BODY), FORWARDED),
    case("expect: something else", post(b"expect: 200-ok"), FORWARDED),
    case("expect: nothing", post(b"expect:"), FORWARDED),
    case("expect: two of them", post(b"expect: 100-continue, x"), FORWARDED),
    case("expect: of an old client", post(b"expect: 100-continue", line=b"POST " + CHAT + b" HTTP/1.0"), FORWARDED),
    case(
        "expect: with too long a body",
        post(b"expect: 100-continue", b"content-length: %d" % (MAX_BODY_BYTES + 1), length=False, body=b""),
        refused(413, closes=True),
    ),
    # The body that was not asked for is not sent, and what comes instead is no body.
    case(
        "expect: too long, and a request behind",
        post(b"expect: 100-continue", b"content-length: %d" % (MAX_BODY_BYTES + 1), length=False, body=b"") + SMUGGLED,
        refused(413, closes=True),
    ),
    case(
        "expect: of nothing",
        post(b"expect: 100-continue", b"content-length: 5", line=b"POST /v1/no HTTP/1.1", length=False, body=b""),
        refused(404, closes=True),
    ),
    case(
        "expect: of what is only read",
        post(b"expect: 100-continue", b"content-length: 5", line=b"PUT /v1/models HTTP/1.1", length=False, body=b""),
        refused(405, closes=True),
    ),
    case(
        "expect: on a GET",
        post(b"expect: 100-continue", line=b"GET /v1/models HTTP/1.1", length=False, body=b""),
        Outcome(statuses=(200,)),
    ),
    case(
        "expect: with a coding that is not known",
        post(b"expect: 100-continue", b"content-encoding: br").removesuffix(BODY),
        refused(415, closes=True),
    ),
    case(
        "expect: with a transfer coding that is not known",
        post(b"expect: 100-continue", b"transfer-encoding: gzip, chunked", length=False, body=b""),
        BAD,
    ),
]

# -- Content-Encoding -----------------------------------------------------------------------------------------------

RAW_DEFLATE = zlib.compress(BODY, wbits=-15)
GZIP = gzip.compress(BODY)
BOMB = gzip.compress(b" " * (40 << 20), compresslevel=9)


def packed(coding: bytes, body: bytes) -> bytes:
    return post(b"content-encoding: " + coding, body=body)


ENCODINGS = [
    case("packed: gzip", packed(b"gzip", GZIP), FORWARDED),
    case("packed: GZIP", packed(b"GZIP", GZIP), FORWARDED),
    case("packed: deflate", packed(b"deflate", zlib.compress(BODY)), FORWARDED),
    case("packed: raw deflate", packed(b"deflate", RAW_DEFLATE), FORWARDED),
    case("packed: identity", packed(b"identity", BODY), FORWARDED),
    case("packed: Identity", packed(b"Identity", BODY), FORWARDED),
    case("packed: several members", packed(b"gzip", gzip.compress(BODY[:20]) + gzip.compress(BODY[20:])), FORWARDED),
    case("packed: an empty member", packed(b"gzip", gzip.compress(b"") + GZIP), FORWARDED),
    case(
        "packed: gzip in chunks",
        post(
            b"content-encoding: gzip",
            b"transfer-encoding: chunked",
            length=False,
            body=b"".join(chunk(GZIP[place : place + 1]) for place in range(len(GZIP))) + LAST,
        ),
        FORWARDED,
    ),
    *each(
        "packed",
        [
            (coding, packed(coding, GZIP))
            for coding in (
                b"br",
                b"zstd",
                b"compress",
                b"x-gzip",
                b"gzip, gzip",
                b"gzip,deflate",
                b"identity, gzip",
                b"gzip;q=1",
                b"gzipx",
                b"*",
                b"utf-8",
                b"aws-chunked",
                b"gz\xc4\xb1p",
                b"gzip\r\ncontent-encoding: gzip",
                b"gzip\r\ncontent-encoding: identity",
                b"identity\r\ncontent-encoding: gzip",
                b"x" * 10000,
            )
        ],
        refused(415),
    ),
    case("packed: nothing said", packed(b"", BODY), FORWARDED),
    case("packed: not gzip", packed(b"gzip", BODY), refused(400)),
    case("packed: not deflate", packed(b"deflate", b"\xff" + BODY), refused(400)),
    case("packed: deflate for gzip", packed(b"gzip", zlib.compress(BODY)), refused(400)),
    case("packed: gzip for deflate", packed(b"deflate", GZIP), refused(400)),
    case("packed: plain for identity", packed(b"identity", GZIP), refused(400)),
    case("packed: cut in the data", packed(b"gzip", GZIP[:-12]), refused(400)),
    case("packed: cut in the sum", packed(b"gzip", GZIP[:-2]), refused(400)),
    case("packed: cut in the head", packed(b"gzip", GZIP[:5]), refused(400)),
    case("packed: cut deflate", packed(b"deflate", zlib.compress(BODY)[:-2]), refused(400)),
    case("packed: cut raw deflate", packed(b"deflate", RAW_DEFLATE[:-2]), refused(400)),
    case("packed: a wrong sum", packed(b"gzip", GZIP[:-8] + b"\0" * 4 + GZIP[-4:]), refused(400)),
    case("packed: a wrong length", packed(b"gzip", GZIP[:-4] + b"\0" * 4), refused(400)),
    case("packed: something behind", packed(b"gzip", GZIP + b"x"), refused(400)),
    case("packed: zeros behind", packed(b"gzip", GZIP + b"\0" * 100), refused(400)),
    case("packed: a request behind", packed(b"gzip", GZIP + SMUGGLED), refused(400)),
    case("packed: something behind deflate", packed(b"deflate", zlib.compress(BODY) + b"x"), refused(400)),
    case("packed: nested", packed(b"gzip", gzip.compress(GZIP)), refused(400)),
    case("packed: nothing in it", packed(b"gzip", gzip.compress(b"")), refused(400)),
    case("packed: no bytes", packed(b"gzip", b""), refused(400)),
    case("packed: a bomb", packed(b"gzip", BOMB), refused(413)),
    case("packed: a bomb of deflate", packed(b"deflate", zlib.compress(b" " * (40 << 20), 9)), refused(413)),
    case("packed: a bomb of members", packed(b"gzip", gzip.compress(b"") * 2000 + GZIP), refused(400)),
    case(
        "packed: just at the limit",
        packed(b"gzip", gzip.compress(BODY.ljust(MAX_BODY_BYTES))),
        forwarded(BODY.ljust(MAX_BODY_BYTES)),
    ),
    case("packed: just over the limit", packed(b"gzip", gzip.compress(BODY.ljust(MAX_BODY_BYTES + 1))), refused(413)),
    case(
        "packed: a bomb on a GET",
        post(b"content-encoding: gzip", line=b"GET /v1/models HTTP/1.1", body=BOMB[:1000]),
        Outcome(statuses=(200,)),
    ),
    case(
        "packed: br on a GET", post(b"content-encoding: br", line=b"GET /v1/models HTTP/1.1"), Outcome(statuses=(200,))
    ),
]

# -- sizes and documents --------------------------------------------------------------------------------------------

UNICODE = (b"\xef\xbb\xbf" + BODY, BODY.decode().encode("utf-16"), BODY.decode().encode("utf-32"))
DOCUMENTS = [
    case("document: at the limit", post(body=BODY.ljust(MAX_BODY_BYTES)), forwarded(BODY.ljust(MAX_BODY_BYTES))),
    # vLLM reads these, too, and gets the bytes as they are.
    *(case(f"document: {shown(body)}", post(body=body), forwarded(body)) for body in UNICODE),
    case("document: over the limit", post(body=BODY.ljust(MAX_BODY_BYTES + 1)), refused(413)),
    *each(
        "document",
        [
            (body, post(body=body))
            for body in (
                b"{",
                b"[]",
                b"null",
                b"0",
                b'""',
                b"\x00",
                b"\xff\xfe{",
                BODY + b"x",
                BODY + BODY,
                BODY[:-1],
                BODY.replace(b'"', b"'"),
                BODY + b"\x00",
                BODY.replace(b"{", b"{,", 1),
                b"[" * 50000,
                b'{"a":' * 10000,
                b'{"model":"reasoning","messages":' + b"[" * 60000,
                b'{"messages":[]}',
                b'{"model":null}',
                b'{"model":["reasoning"]}',
            )
        ],
        refused(400),
    ),
    *each(
        "document",
        [
            (model, post(body=BODY.replace(b"reasoning", model)))
            for model in (
                b"../reasoning",
                b"http://evil.test/",
                b"reasoning\\u0000",
                b"reasoning\\r\\nhost: evil.test",
                b"\\ud800",
                b"*",
                b"REASONING",
                b"reasoning/../x",
                b"x" * 10000,
            )
        ],
        refused(404),
    ),
]

# -- other protocols ------------------------------------------------------------------------------------------------

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(1, 33)) + b"\x00\x02\x13\x01" + b"\x00" * 153
PROTOCOLS = (b"websocket", b"h2c", b"tcp", b"TLS/1.0", b"evil")
UPGRADE = [
    *each(
        "upgrade, but of nothing",
        [(name, post(b"upgrade: " + name, b"connection: keep-alive")) for name in PROTOCOLS],
        FORWARDED,
    ),
    # Answered as if it had not been asked; but whoever asks may already be speaking something else.
    *each(
        "upgrade",
        [
            (b"%b with %b" % (name, connection), post(b"upgrade: " + name, b"connection: " + connection))
            for name in PROTOCOLS
            for connection in (b"upgrade", b"Upgrade, HTTP2-Settings", b"keep-alive, upgrade")
        ],
        LAST_ONE,
    ),
    *each(
        "upgrade, and a request behind",
        [(name, post(b"upgrade: " + name, b"connection: upgrade") + SMUGGLED) for name in PROTOCOLS],
        LAST_ONE,
    ),
    *each(
        "upgrade of a GET, and a request behind",
        [
            (
                name,
                post(
                    b"upgrade: " + name,
                    b"connection: upgrade",
                    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
                    b"sec-websocket-version: 13",
                    line=b"GET /v1/models HTTP/1.1",
                    body=b"",
                    length=False,
                )
                + SMUGGLED,
            )
            for name in PROTOCOLS
        ],
        Outcome((200,), closes=True),
    ),
    case("HTTP/2 preface", PREFACE, BAD),
    case("HTTP/2 preface and frames", PREFACE + bytes.fromhex("000000040000000000"), BAD),
    case("HTTP/2 preface behind a request", post() + PREFACE, BAD),
    # The pure parser waits for the end of a line, which the deadline for headers ends.
    case("TLS hello", HELLO, BAD),
    case("TLS 1.0 hello", bytes.fromhex("1603010005010000010a"), BAD),
    case("SSL 2 hello", bytes.fromhex("802e0100020015000000100100800200800300800600"), BAD, pure=CLOSED),
    case("SSH", b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", BAD, pure=CLOSED),
    case("SMTP", b"EHLO evil.test\r\nMAIL FROM:<a@b>\r\n\r\n", BAD),
    case("Redis", b"*1\r\n$4\r\nPING\r\n\r\n", BAD),
    case("memcached", b"get a\r\nset b 0 0 1\r\n1\r\n\r\n", BAD),
    case("PROXY v1", b"PROXY TCP4 127.0.0.1 127.0.0.1 1 2\r\n" + post(), BAD),
    case("PROXY v2", bytes.fromhex("0d0a0d0a000d0a515549540a") + b"\x21\x11\x00\x0c" + b"\x00" * 12 + post(), BAD),
    case("zeros", b"\x00" * 4096, BAD, pure=CLOSED),
    case("many zeros", b"\x00" * 100000, BAD),
    case("0xff", b"\xff" * 100000, BAD),
    case("one long line", b"A" * 100000, BAD),
    case("line breaks, then a request", b"\r\n" * 1000 + post(), FORWARDED),
    case("spaces, then a request", b" " * 10 + post(), BAD),
    case("a response", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", BAD),
]

# -- one behind the other -------------------------------------------------------------------------------------------

MODELS = post(line=b"GET /v1/models HTTP/1.1", body=b"", length=False)
PIPELINES = [
    case("pipeline: two", post() * 2, Outcome((200, 200), (BODY, BODY))),
    case("pipeline: forty", MODELS * 40, Outcome((200,) * 40)),
    case("pipeline: one of each", MODELS + post() + MODELS + post(), Outcome((200,) * 4, (BODY, BODY))),
    case(
        "pipeline: a refusal in the middle", post() + post(body=b"{") + post(), Outcome((200, 400, 200), (BODY, BODY))
    ),
    case("pipeline: with line breaks between", post() + b"\r\n" + post(), Outcome((200, 200), (BODY, BODY))),
    # What comes together with garbage is not served, since the parser gives up before it has been handed on.
    case("pipeline: garbage behind", post() + b"\x00garbage\r\n\r\n", BAD),
    case("pipeline: a bad request behind", post() + post(b"x : y"), BAD),
    case(
        "pipeline: garbage behind what is being read",
        (post(b"expect: 100-continue").removesuffix(BODY), BODY + b"\x00garbage\r\n\r\n"),
        Outcome((200, 400), (BODY,), closes=True),
    ),
    case(
        "pipeline: garbage in the body of the second",
        (
            post(b"expect: 100-continue").removesuffix(BODY),
            BODY + post(b"transfer-encoding: chunked", length=False, body=b"2\r\n{}\r\nzz\r\n\r\n"),
        ),
        Outcome((200, 400), (BODY,), closes=True),
    ),
    case("pipeline: behind a bad one", post(b"x : y") + post(), BAD),
    case("pipeline: behind one that closes", post(b"connection: close") + SMUGGLED, BAD),
    case(
        "pipeline: line break behind one that closes",
        post(b"connection: close") + b"\r\n",
        LAST_ONE,
    ),
    case("pipeline: behind HTTP/1.0", post(line=b"POST " + CHAT + b" HTTP/1.0") + SMUGGLED, BAD),
    case("pipeline: a smuggled prefix", post(body=BODY + SMUGGLED), refused(400)),
]

ALL = [
    *FINE,
    *REQUEST_LINE,
    *METHODS,
    *TARGETS,
    *HOSTS,
    *LENGTHS,
    *CODINGS,
    *CHUNKS,
    *FIELDS,
    *HOP_BY_HOP,
    *EXPECT,
    *ENCODINGS,
    *DOCUMENTS,
    *UPGRADE,
    *PIPELINES,
]
