"""A sound configuration, and what breaks it: each fault with its place, its key and some of its words."""

from __future__ import annotations

SOUND = """\
# A gateway.
[server]
listen = "127.0.0.1:8080"
admin_listen = "127.0.0.1:9464"
max_connections = 1024
header_timeout_seconds = 10
keepalive_timeout_seconds = 75
body_timeout_seconds = 10
body_min_bytes_per_second = 65536
max_body_bytes = 67108864
body_memory_bytes = 268435456
response_buffer_bytes = 4194304
client_stall_timeout_seconds = 60
drain_timeout_seconds = 30
first_sign_seconds = 2
sign_interval_seconds = 10
models_refresh_seconds = 60
log_level = "info"
log_format = "text"

[auth]
mode = "keys"
[auth.keys.alice]
credential = "alice"
models = [
    "reasoning", # the large one
    "embeddings",
]
queue_places = 4

[upstreams.reasoning]
url = "http://reasoning:80"
models = ["reasoning", "big"]
connect_timeout_seconds = 5
first_byte_timeout_seconds = 600
idle_timeout_seconds = 120
aliases = { claude_reasoning = "reasoning", large = "big" }

[upstreams.reasoning.admission]
engine_slots = 8
cap = 6
queue_limit = 32
queue_timeout_seconds = 60
retry_after_min_seconds = 1
retry_after_max_seconds = 60
abort_settle_seconds = 0.2

[upstreams.reasoning.dialect]
images = false

[upstreams.embeddings]
models = ["embeddings"]
connect_timeout_seconds = 5
first_byte_timeout_seconds = 60
idle_timeout_seconds = 60
[upstreams.embeddings.admission]
cap = 3
queue_limit = 32
queue_timeout_seconds = 60
retry_after_min_seconds = 1
retry_after_max_seconds = 60
abort_settle_seconds = 0.2
[[upstreams.embeddings.endpoints]]
url = "http://e0:80"
engine_slots = 2
[[upstreams.embeddings.endpoints]]
url = "http://e1:80"
engine_slots = 2
"""

REASONING, EMBEDDINGS = "upstreams.reasoning", "upstreams.embeddings"
ADMISSION = f"{REASONING}.admission"
# Pieces of the file above.
UPSTREAM_HEADER = f"[{REASONING}]\n"
ADMISSION_HEADER = f"[{ADMISSION}]"
LIMITS = SOUND[SOUND.index("engine_slots = 8\n") : SOUND.index("\n[upstreams.reasoning.dialect]")]
ALIASES = '{ claude_reasoning = "reasoning", large = "big" }'
ENDPOINT_HEADER = "[[upstreams.embeddings.endpoints]]"
SECOND_ENDPOINT = SOUND[SOUND.rindex("[[") :]
AUTH_ON, ADMISSION_ON = SOUND[SOUND.index("[auth]") :], SOUND[SOUND.index(ADMISSION_HEADER) :]
SYNTAX = "not valid TOML"
MISSING = "missing; it has no default"

Replacement = Expected = tuple[str, str]
# A name; what is replaced by what, from the first place on; and for each fault its key and some of its words.
CORPUS: list[tuple[str, list[Replacement], list[Expected]]] = [
    # Single values.
    ("integer-as-string", [("cap = 6", 'cap = ^"6"')], [(f"{ADMISSION}.cap", "a whole number, at least 1")]),
    ("integer-as-float", [("cap = 6", "cap = ^6.0")], [(f"{ADMISSION}.cap", "found a float (6.0)")]),
    ("integer-as-boolean", [("cap = 6", "cap   =   ^true")], [(f"{ADMISSION}.cap", "found a boolean (true)")]),
    ("zero-cap", [("cap = 6", "\tcap =\t^0")], [(f"{ADMISSION}.cap", "at least 1")]),
    ("negative-queue", [("queue_limit = 32", "queue_limit = ^-1")], [(f"{ADMISSION}.queue_limit", "at least 0")]),
    (
        "retry-too-long",
        [("max_seconds = 60", "max_seconds = ^61")],
        [(f"{ADMISSION}.retry_after_max_seconds", "from 1 to 60")],
    ),
    (
        "date-as-seconds",
        [("drain_timeout_seconds = 30", "drain_timeout_seconds = ^2026-12-01 10:00:00")],
        [("server.drain_timeout_seconds", "a positive number of seconds")],
    ),
    (
        "seconds-that-are-none",
        [("idle_timeout_seconds = 120", "idle_timeout_seconds = ^inf")],
        [(f"{REASONING}.idle_timeout_seconds", "a positive number")],
    ),
    (
        "never-that-is-not",
        [("first_sign_seconds = 2", "first_sign_seconds = ^-0.5")],
        [("server.first_sign_seconds", "or 0 for never")],
    ),
    (
        "choice-mistyped",
        [('"info"', '^"inf"')],
        [("server.log_level", '"debug" or "info" or "warning" or "error", found a string ("inf"); did you mean info?')],
    ),
    (
        "choice-unknown",
        [('"text"', '^"xml"')],
        [("server.log_format", '"auto" or "text" or "json", found a string ("xml")')],
    ),
    ("choice-of-another-type", [('mode = "keys"', "mode = ^[]")], [("auth.mode", '"none" or "keys", found an array')]),
    ("listen-without-port", [('"127.0.0.1:8080"', '^"127.0.0.1"')], [("server.listen", '"HOST:PORT"')]),
    ("listen-as-port", [('"127.0.0.1:8080"', "^8080")], [("server.listen", "found an integer (8080)")]),
    (
        "url-without-scheme",
        [('"http://reasoning:80"', '^"reasoning:80"')],
        [(f"{REASONING}.url", '"http://HOST[:PORT]"')],
    ),
    (
        "url-with-v1",
        [("http://reasoning:80", "http://reasoning:80/v1"), ('"http://rea', '^"http://rea')],
        [(f"{REASONING}.url", "without /v1")],
    ),
    (
        "switch-as-number",
        [("images = false", "images = ^0")],
        [(f"{REASONING}.dialect.images", "expected true or false")],
    ),
    ("empty-name", [('"big"]', '"big", ^""]')], [(f"{REASONING}.models.2", "a string that is not empty")]),
    (
        "number-among-names",
        [('["reasoning", "big"]', '[ # all\n  "reasoning",\n  "big",\n  ^3]')],
        [(f"{REASONING}.models.2", "found an integer (3)")],
    ),
    (
        "no-models",
        [('["reasoning", "big"]', "^[]"), ('    "reasoning", # the large one\n', ""), (ALIASES, "{}")],
        [(f"{REASONING}.models", "at least one name, found none")],
    ),
    ("alias-as-number", [('large = "big"', "large = ^1")], [(f"{REASONING}.aliases.large", "found an integer (1)")]),
    ("aliases-as-array", [(ALIASES, '^["big"]')], [(f"{REASONING}.aliases", "a table of names and their models")]),
    (
        "member-that-decides",
        [("images = false", "body_defaults = ^{ n = 2 }")],
        [(f"{REASONING}.dialect.body_defaults", "n is for the client to say")],
    ),
    (
        "credential-as-path",
        [('credential = "alice"', 'credential = ^"/etc/alice"')],
        [("auth.keys.alice.credential", "the name of a credential")],
    ),
    ("file-not-absolute", [('credential = "alice"', "file = ^'alice'")], [("auth.keys.alice.file", "absolute path")]),
    (
        "endpoint-as-number",
        [(SECOND_ENDPOINT, SECOND_ENDPOINT.replace("2\n", '^"2"\n'))],
        [(f"{EMBEDDINGS}.endpoints.1.engine_slots", 'found a string ("2")')],
    ),
    # Keys.
    (
        "key-mistyped",
        [("cap = 6\n", "cap = 6\n^capp = 7\n")],
        [(f"{ADMISSION}.capp", "unknown key; did you mean cap? Known")],
    ),
    (
        "key-mistyped-only",
        [("queue_limit", "^queue_limits")],
        [(f"{ADMISSION}.queue_limits", "unknown key; did you mean queue_limit?")],
    ),
    (
        "key-without-unit",
        [("drain_timeout_seconds = 30\n", "drain_timeout_seconds = 30\n  ^drain_timeout = 30\n")],
        [("server.drain_timeout", "did you mean drain_timeout_seconds?")],
    ),
    (
        "key-in-another-table",
        [(UPSTREAM_HEADER, UPSTREAM_HEADER + "^queue_limit = 1\n")],
        [(f"{REASONING}.queue_limit", "it belongs to [upstreams.NAME.admission]")],
    ),
    ("key-at-the-top", [("# A gateway.\n", "^log_level = 'info'\n")], [("log_level", "it belongs to [server]")]),
    (
        "key-quoted",
        [("log_format", '^"log format" = 1\nlog_format')],
        [('server."log format"', "did you mean log_format?")],
    ),
    (
        "key-dotted",
        [("log_format", "tls.certificate = 'c'\ntls.key = 'k'\ntls.^ca = 'x'\nlog_format")],
        [("server.tls.ca", "unknown key")],
    ),
    (
        "key-of-no-kind",
        [("images = false", "^temperature = 1")],
        [(f"{REASONING}.dialect.temperature", "unknown key. Known here: images, ")],
    ),
    (
        "key-in-inline-table",
        [("log_format", 'tls = { certificate = "c", key = "k", ^kee = "k" }\nlog_format')],
        [("server.tls.kee", "did you mean key?")],
    ),
    (
        "key-in-array-of-tables",
        [("engine_slots = 2\n[[", "engine_slots = 2\n^slots = 2\n[[")],
        [(f"{EMBEDDINGS}.endpoints.0.slots", "unknown key")],
    ),
    (
        "key-in-array-of-inline-tables",
        [
            (
                'url = "http://reasoning:80"',
                'endpoints = [\n  { url = "http://r0", engine_slots = 4 },\n'
                '  { ^uri = "http://r2", url = "http://r1", engine_slots = 4 },\n]',
            ),
            ("engine_slots = 8\n", ""),
        ],
        [(f"{REASONING}.endpoints.1.uri", "did you mean url?")],
    ),
    (
        "table-mistyped",
        [("[upstreams.reasoning.dialect]", "[upstreams.reasoning.^dialekt]")],
        [(f"{REASONING}.dialekt", "did you mean dialect?")],
    ),
    (
        "table-of-no-kind",
        [("[auth]", "[^metrics]\nport = 1\n[auth]")],
        [("metrics", "Known here: server, auth, upstreams")],
    ),
    (
        "table-at-the-wrong-place",
        [("[auth]", "[server.^dialect]\n[auth]")],
        [("server.dialect", "it belongs to [upstreams.NAME]")],
    ),
    # What is missing.
    ("missing-cap", [(ADMISSION_HEADER, f"^{ADMISSION_HEADER}"), ("cap = 6\n", "")], [(f"{ADMISSION}.cap", MISSING)]),
    (
        "missing-two",
        [("[server]", "^^[server]"), ("first_sign_seconds = 2\n", ""), ('log_level = "info"\n', "")],
        [("server.first_sign_seconds", MISSING), ("server.log_level", MISSING)],
    ),
    (
        "missing-engine-slots",
        [(ADMISSION_HEADER, f"^{ADMISSION_HEADER}"), ("engine_slots = 8\n", "")],
        [(f"{ADMISSION}.engine_slots", MISSING)],
    ),
    (
        "missing-url",
        [(UPSTREAM_HEADER, "^" + UPSTREAM_HEADER), ('url = "http://reasoning:80"\n', "")],
        [(f"{REASONING}.url", MISSING)],
    ),
    (
        "missing-in-inline-table",
        [("log_format", 'tls = ^{ key = "k" }\nlog_format')],
        [("server.tls.certificate", MISSING)],
    ),
    ("missing-in-dotted-table", [("log_format", '^tls.key = "k"\nlog_format')], [("server.tls.certificate", MISSING)]),
    (
        "missing-in-array-of-tables",
        [('[[upstreams.embeddings.endpoints]]\nurl = "http://e1:80"\n', "^[[upstreams.embeddings.endpoints]]\n")],
        [(f"{EMBEDDINGS}.endpoints.1.url", MISSING)],
    ),
    (
        "missing-table",
        [("[auth]\n", ""), ('mode = "keys"\n', ""), ("[auth.keys.alice]", "^[auth.keys.alice]")],
        [("auth.mode", MISSING)],
    ),
    (
        "missing-inner-table",
        [(UPSTREAM_HEADER, "^" + UPSTREAM_HEADER), (f"{ADMISSION_HEADER}\n{LIMITS}", "")],
        [(ADMISSION, MISSING)],
    ),
    ("missing-all-upstreams", [(AUTH_ON, "[auth]\nmode = 'none' # nobody^\n")], [("upstreams", MISSING)]),
    # Something else where a table is expected.
    (
        "server-as-text",
        [(SOUND[: SOUND.index("[auth]")], 'server = ^"127.0.0.1:80"\n')],
        [("server", "expected a table")],
    ),
    (
        "admission-mistyped",
        [
            (ADMISSION_HEADER, 'admission = ^"unlimitd"\n[upstreams.reasoning.dialect]'),
            (f"{LIMITS}\n[{REASONING}.dialect]", ""),
            (f"aliases = {ALIASES}\n\n", ""),
        ],
        [(ADMISSION, 'or "unlimited"')],
    ),
    (
        "upstream-as-address",
        [("[upstreams.reasoning]\n", '[upstreams]\nx = ^"http://x"\n[upstreams.reasoning]\n')],
        [("upstreams.x", "expected a table")],
    ),
    (
        "endpoints-as-table",
        [(SECOND_ENDPOINT, ""), ("[[upstreams.embeddings.endpoints]]", "^[upstreams.embeddings.endpoints]")],
        [(f"{EMBEDDINGS}.endpoints", "an array of at least one table")],
    ),
    # Values that do not go together.
    ("cap-not-below-slots", [("cap = 6", "cap = ^8")], [(f"{ADMISSION}.cap", "less than engine_slots (8)")]),
    (
        "cap-not-below-all-slots",
        [("cap = 3", "cap = ^4")],
        [(f"{EMBEDDINGS}.admission.cap", "less than engine_slots (4)")],
    ),
    (
        "retry-upside-down",
        [("min_seconds = 1\nretry_after_max_seconds = 60", "min_seconds = ^30\nretry_after_max_seconds = 20")],
        [(f"{ADMISSION}.retry_after_min_seconds", "at most retry_after_max_seconds (20)")],
    ),
    (
        "model-twice",
        [('models = ["embeddings"]', 'models = ["embeddings", ^"big"]')],
        [(f"{EMBEDDINGS}.models.1", '"big" is already a model of upstreams.reasoning (see line 33, column 24)')],
    ),
    (
        "model-twice-in-a-list",
        [('"reasoning", "big"]', '"reasoning", "big", ^"reasoning"]')],
        [(f"{REASONING}.models.2", '"reasoning" is already a model of this upstream (see line 33, column 11)')],
    ),
    (
        "alias-is-a-model",
        [("large = ", "^reasoning = ")],
        [(f"{REASONING}.aliases.reasoning", "already a model of this upstream (see line 33, column 11)")],
    ),
    ("alias-of-nothing", [('large = "big"', 'large = ^"bigg"')], [(f"{REASONING}.aliases.large", "did you mean big?")]),
    (
        "address-twice",
        [('"http://e1:80"', '^"http://reasoning"')],
        [(f"{EMBEDDINGS}.endpoints.1.url", "its models under one upstream (see line 32, column 1)")],
    ),
    (
        "url-and-endpoints",
        [
            (
                '[[upstreams.embeddings.endpoints]]\nurl = "http://e0:80"',
                '[[upstreams.embeddings.^endpoints]]\nurl = "http://e0:80"',
            ),
            ('models = ["embeddings"]', 'models = ["embeddings"]\nurl = "http://e"'),
        ],
        [(f"{EMBEDDINGS}.endpoints", "either url or endpoints, found both")],
    ),
    (
        "slots-at-two-places",
        [("cap = 3", "cap = 3\n^engine_slots = 4")],
        [(f"{EMBEDDINGS}.admission.engine_slots", "with each of endpoints")],
    ),
    (
        "key-for-no-model",
        [('    "embeddings",\n]', '    ^"embedings",\n]')],
        [("auth.keys.alice.models.1", 'no upstream serves "embedings"; did you mean embeddings?')],
    ),
    (
        "key-at-two-places",
        [("[auth.keys.alice]", "^[auth.keys.alice]\nfile = '/k'")],
        [("auth.keys.alice", "one of file and credential, found both")],
    ),
    (
        "keys-for-nobody",
        [('mode = "keys"', 'mode = "none"'), ("[auth.keys.alice]", "^[auth.keys.alice]")],
        [("auth.keys", 'only with auth.mode = "keys"')],
    ),
    (
        "one-place-for-two",
        [('"127.0.0.1:9464"', '^"127.0.0.1:8080"')],
        [("server.admin_listen", "the same address as server.listen")],
    ),
    (
        "memory-for-less-than-one",
        [("= 268435456", "= ^1")],
        [("server.body_memory_bytes", "at least max_body_bytes (67108864)")],
    ),
    (
        "ca-without-tls",
        [(UPSTREAM_HEADER, UPSTREAM_HEADER + "^ca_file = '/ca'\n")],
        [(f"{REASONING}.ca_file", "only for an https url")],
    ),
    # Around strings that look like something else.
    (
        "behind-a-long-string",
        [("# A gateway.\n", ""), ("images = false", "reasoning_field = '''\n[server]\ncap = \"\n'''\nimages = ^1")],
        [(f"{REASONING}.dialect.images", "true or false")],
    ),
    (
        "behind-a-wide-character",
        [('["reasoning", "big"]', '["reasoning", "big", "grüße 😀", ^1]')],
        [(f"{REASONING}.models.3", "a string")],
    ),
    # What is no TOML: the place where it stops to be.
    ("no-value", [("cap = 6", "cap = ^")], [("", f"{SYNTAX}: expected a value: a ")]),
    ("no-quote", [('"info"', '"info^')], [("", SYNTAX)]),
    ("no-equals", [("cap = 6", "cap ^6")], [("", SYNTAX)]),
    ("no-bracket", [("[auth]", "[auth^")], [("", SYNTAX)]),
    ("no-comma", [('"reasoning", "big"]', '"reasoning" ^"big"]')], [("", SYNTAX)]),
    ("bare-word", [('"info"', "inf^o")], [("", SYNTAX)]),
    ("leading-zero", [("cap = 6", "cap = 0^6")], [("", SYNTAX)]),
    ("key-twice", [("cap = 6", "cap = 6\ncap = 7^")], [("", SYNTAX)]),
    ("table-twice", [("[auth]", "[server^]\n[auth]")], [("", SYNTAX)]),
    (
        "end-too-early",
        [(SOUND[SOUND.index(ADMISSION_HEADER) :], "[upstreams.x]\nmodels = [\n  'a',^\n\n")],
        [("", SYNTAX)],
    ),
    # Many at once.
    (
        "many",
        [
            ('"127.0.0.1:8080"', "^8080"),
            ('"text"', '^"xml"'),
            (ADMISSION_HEADER, f"^{ADMISSION_HEADER}"),
            ("cap = 6\n", ""),
            ("queue_limit = 32", 'queue_limit = ^"many"'),
            ("images", "^image"),
            ("cap = 3", "cap = ^3"),
            ("engine_slots = 2", "engine_slots = ^0"),
        ],
        [
            ("server.listen", ""),
            ("server.log_format", ""),
            (f"{ADMISSION}.cap", MISSING),
            (f"{ADMISSION}.queue_limit", ""),
            (f"{REASONING}.dialect.image", "did you mean images?"),
            (f"{EMBEDDINGS}.admission.cap", "(2)"),
            (f"{EMBEDDINGS}.endpoints.0.engine_slots", ""),
        ],
    ),
]
