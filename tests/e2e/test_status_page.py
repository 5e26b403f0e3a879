"""The status page in a real browser, against the account of the upstream that it tells of."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rig import (
    DONE,
    FIRST_EVENT,
    OPENAI,
    RawClient,
    Rig,
    RunningGateway,
    ScriptedUpstream,
    configuration,
    eventually,
    upstream_table,
)
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from aiogw.status import figures, serving

PAGE_CSS = Path(__file__).parents[2] / "aiogw" / "status" / "page.css"
MAX_PAGE_BYTES = 30_000

# What the page shows, as its reader sees it.
LOOK = """
const texts = (parent, what) => [...parent.querySelectorAll(what)].map(one => one.textContent);
const drawn = [...document.querySelectorAll('section[data-upstream]')].map(section => ({
    name: section.querySelector('h2').textContent,
    slots: [...section.querySelectorAll('.slots li')].map(li => li.firstChild ? li.firstChild.className : li.className),
    slotIds: [...section.querySelectorAll('.slots .chip')].map(chip => chip.title.split(',')[0]),
    queueIds: [...section.querySelectorAll('.queue .chip')].map(chip => chip.title.split(',')[0]),
    places: section.querySelectorAll('.queue li').length,
    label: section.querySelector('.drawing').getAttribute('aria-label'),
    tiles: texts(section, '.tiles strong'),
    endpoints: texts(section, '.endpoints li'),
    newcomer: section.querySelector('.waits').textContent,
    scales: texts(section, '.scale'),
    beside: texts(section, '.tiles small'),
    sparks: section.querySelectorAll('.spark polyline[points*=","]').length,
    tables: Object.fromEntries([...section.querySelectorAll('table')].filter(table => !table.parentElement.hidden).map(
        table => [table.caption.textContent, [...table.tBodies[0].rows].map(row => texts(row, 'th, td'))])),
}));
return {
    state: document.getElementById('state').textContent,
    title: document.title,
    upstreams: drawn,
    endings: [...document.querySelectorAll('#endings tbody tr')].map(row => [...row.cells].map(c => c.textContent)),
    moves: window.moves,
    overflow: document.documentElement.scrollWidth - window.innerWidth,
};
"""
# Whatever is in a table and cannot be read to its end, but for ids.
CUT_OFF = """
return [...document.querySelectorAll('td, thead th')].filter(
    cell => cell.scrollWidth > cell.clientWidth + 1
).map(cell => cell.textContent);
"""
LEAVING = "return [...document.querySelectorAll('.leaves')].map(one => one.textContent)"
RELOAD = "return document.getElementById('reload').textContent"
COUNT_MOVES = """
window.moves = 0;
const animate = Element.prototype.animate;
Element.prototype.animate = function (frames, ...more) {
    if ('transform' in frames[0]) window.moves += 1;
    return animate.call(this, frames, ...more);
};
"""


class Browser:
    """Chromium without a screen; its calls wait in a thread, so that gateway and upstream go on."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        options.binary_location = found("chromium")
        self.driver = webdriver.Chrome(options=options, service=Service(found("chromedriver")))
        self.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": COUNT_MOVES})

    async def open(
        self,
        gateway: RunningGateway,
        *,
        width: int = 1200,
        dark: bool = False,
        calm: bool = False,
        scripts: bool = True,
    ) -> None:
        def go() -> None:
            command = self.driver.execute_cdp_cmd
            command("Emulation.setScriptExecutionDisabled", {"value": not scripts})
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            command("Emulation.setDeviceMetricsOverride", size)
            features = {
                "prefers-color-scheme": "dark" if dark else "light",
                "prefers-reduced-motion": "reduce" if calm else "no-preference",
            }
            media = [{"name": name, "value": value} for name, value in features.items()]
            command("Emulation.setEmulatedMedia", {"features": media})
            host, port = gateway.admin_address
            self.driver.get(f"http://{host}:{port}/status")

        await asyncio.to_thread(go)

    async def run(self, script: str) -> Any:
        return await asyncio.to_thread(self.driver.execute_script, script)

    async def look(self) -> dict[str, Any]:
        return dict(await self.run(LOOK))

    async def shows(self, condition: Callable[[dict[str, Any]], Any], seconds: float = 15) -> dict[str, Any]:
        """Look until what is shown is as expected."""
        shown: dict[str, Any] = {}

        async def looks_so() -> bool:
            nonlocal shown
            shown = await self.look()
            # A page that has only just been opened may not have drawn an upstream.
            return bool(shown["upstreams"]) and bool(condition(shown))

        await eventually(looks_so, seconds, what=lambda: repr(shown))
        return shown

    def complaints(self) -> list[Any]:
        return [entry for entry in self.driver.get_log("browser") if "ERR_" not in entry["message"]]

    def leave(self) -> None:
        self.driver.get("about:blank")


def found(program: str) -> str:
    path = shutil.which(program)
    assert path is not None, f"{program} is not installed: scripts/need chromium and chromium-driver"
    return path


@pytest.fixture(scope="module")
def one_browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.driver.quit()


@pytest.fixture
async def browser(one_browser: Browser, rig: Rig) -> AsyncIterator[Browser]:
    """The browser, which complained of nothing while the test ran: no script that failed, and none that was refused."""
    one_browser.complaints()
    yield one_browser
    complaints = await asyncio.to_thread(one_browser.complaints)
    await asyncio.to_thread(one_browser.leave)
    assert complaints == []


async def saturate(rig: Rig, gateway: RunningGateway, upstream: ScriptedUpstream, *, cap: int, waiting: int) -> None:
    """Requests 0, 1, ... in their order: ``cap`` at the upstream, then ``waiting`` in the queue."""
    for tag in range(cap + waiting):
        await rig.post(gateway, OPENAI, tag, f"x-request-id: id-{tag}", stream=True)
        await (upstream.exchange(tag) if tag < cap else gateway.waiting(tag - cap + 1))


async def drain(upstream: ScriptedUpstream, gateway: RunningGateway) -> None:
    upstream.script = lambda exchange: exchange.stream()
    for exchange in upstream.exchanges:
        if not exchange.finished:
            exchange.stream()
    await gateway.settled()


def only(shown: dict[str, Any]) -> dict[str, Any]:
    (one,) = shown["upstreams"]
    return dict(one)


async def test_the_page_shows_what_the_upstream_sees(rig: Rig, browser: Browser) -> None:
    """At rest, saturated, while the queue moves up, and drained: always who is where, as the upstream counts them."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream, cap=3, queue_limit=6)
    await browser.open(daemon)
    shown = await browser.shows(lambda shown: shown["state"] == "live")
    one = only(shown)
    assert (["", "", ""], 6, []) == (one["slots"], one["places"], one["queueIds"])
    assert ["0 of 3", "0 of 6", "nobody waits", "runs at once"] == one["tiles"]
    assert ["max 0 · 5 min", "max 0 · 5 min", "max 0.0 s · 5 min"] == one["scales"]
    assert "at most 10 s each" in one["beside"]

    await saturate(rig, daemon, upstream, cap=3, waiting=4)
    refused = await rig.ask(daemon, OPENAI, 77, "x-request-id: unknown", model="<img src=x onerror=alert(1)>")
    assert 404 == refused.status
    upstream.exchanges[0].begin_stream(FIRST_EVENT)
    shown = await browser.shows(lambda shown: only(shown)["slots"].count("chip stream") == 1)
    one = only(shown)
    assert ["id-0", "id-1", "id-2"] == one["slotIds"]
    assert ["chip stream", "chip first_byte", "chip first_byte"] == one["slots"]
    assert len(one["slotIds"]) == upstream.in_flight
    assert ["id-3", "id-4", "id-5", "id-6"] == one["queueIds"]
    assert "3 of 3 slots in use, 4 of 6 places in the queue taken" == one["label"]
    assert ["3 of 3", "4 of 6"] == one["tiles"][:2]
    assert "waits" == one["tiles"][3]
    assert "last 5 min: all got a slot at once; nothing has ended yet" == one["newcomer"]
    assert [["id-0", "answering"], ["id-1", "before the first byte"], ["id-2", "before the first byte"]] == [
        [row[0], row[4]] for row in one["tables"]["At work"]
    ]
    assert [[f"id-{place + 2}", str(place)] for place in (1, 2, 3, 4)] == [
        [row[0], row[4]] for row in one["tables"]["Waiting"]
    ]
    assert "3/3 +4 aiogw" == shown["title"]
    assert ["unknown", "model not found"] == [shown["endings"][0][0], shown["endings"][0][2]]
    assert "<img src=x onerror=alert(1)>" == shown["endings"][0][5]

    # The second slot comes free: the head of the line moves there, and nobody else who has a slot moves.
    await browser.run("document.querySelector('.queue .chip').dataset.mark = 'head'")
    moves = (await browser.look())["moves"]
    upstream.exchanges[1].stream()
    await upstream.exchange(3)
    one = only(await browser.shows(lambda shown: len(only(shown)["queueIds"]) == 3))
    assert ["id-0", "id-3", "id-2"] == one["slotIds"]
    assert ["id-4", "id-5", "id-6"] == one["queueIds"]
    assert "id-3" == await browser.run("return document.querySelector('.slots [data-mark]').title.split(',')[0]")
    assert (await browser.look())["moves"] >= moves + 4
    assert 3 == upstream.in_flight

    upstream.exchanges[0].end_stream(DONE)
    await drain(upstream, daemon)
    shown = await browser.shows(lambda shown: only(shown)["tiles"][0] == "0 of 3" and len(shown["endings"]) == 8)
    assert {f"id-{tag}" for tag in range(7)} | {"unknown"} == {row[0] for row in shown["endings"]}
    assert {"completed", "model not found"} == {row[2] for row in shown["endings"]}
    assert {} == only(shown)["tables"]
    assert 3 == only(shown)["sparks"]


async def test_the_page_without_scripts(rig: Rig, browser: Browser) -> None:
    """The same, as it was when it was asked for; and it asks again by itself."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream, cap=2, queue_limit=3)
    await saturate(rig, daemon, upstream, cap=2, waiting=3)
    await browser.open(daemon)
    await browser.shows(lambda shown: shown["state"] == "live")
    live = only(await browser.shows(lambda shown: len(only(shown)["queueIds"]) == 3))
    await browser.open(daemon, scripts=False)
    page = (await daemon.admin("/status")).body.decode()
    assert '<noscript><meta http-equiv="refresh" content="5"></noscript>' in page
    assert len(page.encode()) < MAX_PAGE_BYTES
    # Scripts of the driver still run: what stands there is what the gateway wrote.
    shown = await browser.look()
    assert re.fullmatch(r"as of \d\d:\d\d:\d\d UTC", shown["state"])
    static = only(shown)
    for name in ("name", "slots", "slotIds", "queueIds", "places", "label"):
        assert live[name] == static[name]
    assert live["tiles"][:2] == static["tiles"][:2]
    assert live["tables"].keys() == static["tables"].keys()
    for caption, rows in live["tables"].items():
        assert [row[:5] for row in rows] == [row[:5] for row in static["tables"][caption]]
    await drain(upstream, daemon)


async def test_a_page_that_hears_nothing_says_so(rig: Rig, browser: Browser) -> None:
    """At once, and what it shows is as old as that; it is live as soon as the gateway is back, without being asked."""
    upstream = await rig.upstream()
    first = await rig.daemon(upstream)
    host, port = first.admin_address
    await browser.open(first)
    await browser.shows(lambda shown: shown["state"] == "live")
    await first.stop()
    rig.forget(first)
    await browser.shows(lambda shown: shown["state"].startswith("connection lost, trying again; as of "), 2)
    again = await rig.daemon(upstream, server={"admin_listen": f"{host}:{port}"})
    await rig.post(again, OPENAI, 1, "x-request-id: after")
    exchange = await upstream.exchange(0)
    await browser.shows(lambda shown: shown["state"] == "live" and only(shown)["slotIds"] == ["after"], 20)
    exchange.answer()
    await again.settled()


async def test_one_watcher_too_many(rig: Rig, browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told so, sees what there is all the same, and follows the feed as soon as another has gone."""
    monkeypatch.setattr(serving, "MOST_WATCHERS", 1)
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    watcher = await RawClient.connect(gateway.admin_address)
    await watcher.request("GET", "/status/events")
    await watcher.read_head()
    await browser.open(gateway)
    await browser.shows(lambda shown: re.fullmatch(r"enough are watching; as of \d\d:\d\d:\d\d", shown["state"]))
    await rig.post(gateway, OPENAI, 1, "x-request-id: seen")
    exchange = await upstream.exchange(0)
    await browser.shows(lambda shown: only(shown)["slotIds"] == ["seen"])
    watcher.close()
    await browser.shows(lambda shown: shown["state"] == "live")
    assert all("503" in entry["message"] for entry in await asyncio.to_thread(browser.complaints))
    exchange.answer()
    await gateway.settled()


async def test_a_reload_on_the_page(rig: Rig, browser: Browser) -> None:
    """What is no longer configured says that it leaves, what is new stands where it is configured, a fault is told."""
    upstream, other, third = [await rig.upstream() for _ in range(3)]
    gateway = await rig.gateway(upstream)
    await rig.post(gateway, OPENAI, 1, "x-request-id: stays")
    exchange = await upstream.exchange(0)
    await browser.open(gateway)
    await browser.shows(lambda shown: shown["state"] == "live" and only(shown)["slotIds"] == ["stays"])
    assert await gateway.reload(
        configuration({"zulu": upstream_table(other.url), "alfa": upstream_table(third.url, models=["other"])})
    )
    shown = await browser.shows(lambda shown: len(shown["upstreams"]) == 3)
    assert ["zulu", "alfa", "reasoning"] == [one["name"] for one in shown["upstreams"]]
    assert ["", "", figures.LEAVES] == await browser.run(LEAVING)
    assert "is not taken" == shown["upstreams"][2]["tiles"][3]
    assert "" == await browser.run(RELOAD)
    gateway.expect_error("the configuration is not taken")
    assert not await gateway.reload("[server]\n")

    async def told() -> bool:
        return await browser.run(RELOAD) == figures.RELOAD_FAILED

    await eventually(told)
    static = (await gateway.admin("/status")).body.decode()
    assert f'<p id="reload">{figures.RELOAD_FAILED}</p>' in static
    assert f'<p class="leaves">{figures.LEAVES}</p>' in static
    exchange.answer()
    await browser.shows(lambda shown: [one["name"] for one in shown["upstreams"]] == ["zulu", "alfa"])


async def test_the_page_says_what_is_wrong(rig: Rig, browser: Browser) -> None:
    """An upstream that is not reached, waits that are in vain, a gateway that shuts down; with and without scripts."""
    upstream = await rig.upstream(lambda exchange: exchange.stream())
    daemon = await rig.daemon(upstream, queue_timeout_seconds=1)
    await browser.open(daemon)
    await browser.shows(lambda shown: shown["state"] == "live")
    await rig.ask(daemon, OPENAI, 0)
    upstream.script = None
    running = await rig.post(daemon, OPENAI, 1)
    await upstream.exchange(1)
    waits = await rig.post(daemon, OPENAI, 2)
    await browser.shows(lambda shown: only(shown)["tiles"][3].startswith("waits "))
    assert 503 == (await waits.response()).status
    await browser.shows(
        lambda shown: only(shown)["newcomer"] == "last 5 min: all others got a slot at once; 1 gave up or timed out"
    )
    upstream.exchanges[1].answer()
    await running.response()
    await upstream.stop()
    assert 503 == (await rig.ask(daemon, OPENAI, 3)).status
    shown = await browser.shows(lambda shown: only(shown)["tiles"][3] == "probably fails: not reached")
    assert re.fullmatch(r"✕ 127\.0\.0\.1:\d+ not reached since \d\d:\d\d:\d\d, 0 of 8", only(shown)["endpoints"][0])
    await browser.open(daemon, scripts=False)
    static = only(await browser.look())
    assert only(shown)["tiles"] == static["tiles"]
    assert only(shown)["endpoints"][0][:28] == static["endpoints"][0][:28]
    await browser.open(daemon)
    await browser.shows(lambda shown: shown["state"] == "live")
    await upstream.start_again()
    await browser.shows(lambda shown: only(shown)["endpoints"][0].startswith("●"))
    await rig.post(daemon, OPENAI, 4)
    exchange = await upstream.tagged(4)
    rig.forget(daemon)
    daemon.signal(signal.SIGTERM)
    shown = await browser.shows(lambda shown: shown["state"] == "shutting down")
    assert only(shown)["tiles"][3] in ("is served on open connections", "is refused: shutting down")
    await browser.shows(lambda shown: only(shown)["tiles"][3] == "is refused: shutting down")
    exchange.answer()
    assert 0 == await daemon.exit_code()
    shown = await browser.shows(lambda shown: shown["state"].startswith("connection lost"), 2)
    # Its last word is drawn, although the connection was closed right behind it.
    assert ["completed", "upstream not reached"] == [row[2] for row in shown["endings"][:2]]


async def test_nothing_moves_for_who_wants_it_calm(rig: Rig, browser: Browser) -> None:
    """With reduced motion, the queue still moves up, but at once."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream)
    await saturate(rig, daemon, upstream, cap=1, waiting=2)
    await browser.open(daemon, calm=True)
    await browser.shows(lambda shown: only(shown)["queueIds"] == ["id-1", "id-2"])
    upstream.exchanges[0].stream()
    shown = await browser.shows(lambda shown: only(shown)["queueIds"] == ["id-2"])
    assert 0 == shown["moves"]
    await drain(upstream, daemon)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_a_phone_has_room_for_it(rig: Rig, browser: Browser, dark: bool) -> None:
    """Nothing sticks out at the side, however long an id is; and the colours are those that were asked for."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream, cap=2, queue_limit=30)
    await rig.post(daemon, OPENAI, 0, f"x-request-id: {'long-' * 25}")
    await upstream.exchange(0)
    await saturate_more(rig, daemon, upstream)
    refused = await rig.ask(daemon, OPENAI, 9, f"x-request-id: {'long-' * 25}", n=99)
    assert 422 == refused.status
    await browser.open(daemon, width=360, dark=dark)
    shown = await browser.shows(lambda shown: shown["state"] == "live" and len(only(shown)["queueIds"]) == 3)
    assert shown["overflow"] <= 0
    # The gateway's own ids are whole, and what a client chose ends somewhere.
    whole = (
        "return [...document.querySelectorAll('tbody th.id span')].filter(one => one.scrollHeight <= one.clientHeight)"
    )
    ids = await browser.run(f"{whole}.map(one => one.textContent)")
    assert 4 == len(ids)
    assert all(one.startswith("req_") for one in ids)
    assert [] == await browser.run(CUT_OFF)
    red = int(re.findall(r"\d+", await browser.run("return getComputedStyle(document.body).backgroundColor"))[0])
    assert (red < 64) == dark
    await drain(upstream, daemon)


async def test_a_heavy_request_explains_itself(rig: Rig, browser: Browser) -> None:
    """Its row says how many slots it takes, and its upstream that it is why free slots stay free."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream, cap=6, queue_limit=8)
    for number, slots in enumerate((4, 3, 1)):
        await rig.post(daemon, OPENAI, number, f"x-request-id: id-{number}", n=slots)
        await (daemon.waiting(number) if number else upstream.exchange(0))
    await browser.open(daemon, width=360)
    shown = await browser.shows(lambda shown: shown["state"] == "live" and len(only(shown)["queueIds"]) == 2)
    assert "next in line needs 3 slots, 2 are free" in only(shown)["beside"]
    tables = only(shown)["tables"]
    assert ["before the first byte ×4"] == [row[4] for row in tables["At work"]]
    assert ["1 ×3", "2"] == [row[4] for row in tables["Waiting"]]
    assert [] == await browser.run(CUT_OFF)
    await browser.open(daemon, scripts=False)
    static = only(await browser.look())
    assert [row[4] for row in tables["Waiting"]] == [row[4] for row in static["tables"]["Waiting"]]
    assert "next in line needs 3 slots, 2 are free" in static["beside"]
    upstream.script = lambda exchange: exchange.answer()
    upstream.exchanges[0].answer()
    await daemon.settled()


async def saturate_more(rig: Rig, daemon: RunningGateway, upstream: ScriptedUpstream) -> None:
    await rig.post(daemon, OPENAI, 1)
    await upstream.exchange(1)
    await rig.queued(daemon, OPENAI, (2, 3, 4))


async def test_what_assistive_technology_is_told(rig: Rig, browser: Browser) -> None:
    """The drawing is one picture with a text, the tables have captions and heads, and one place alone speaks up."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream)
    await saturate(rig, daemon, upstream, cap=1, waiting=1)
    await browser.open(daemon)
    await browser.shows(lambda shown: "Waiting" in only(shown)["tables"])
    told = await asyncio.to_thread(lambda: browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"])
    nodes = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in told if not node["ignored"]]
    assert ("image", "1 of 1 slots in use, 1 of 8 places in the queue taken") in nodes
    assert {"At work", "Waiting"} <= {name for role, name in nodes if role == "table"}
    assert {"Request", "Place", "Estimate"} <= {name for role, name in nodes if role == "columnheader"}
    assert {"id-0", "id-1"} <= {name for role, name in nodes if role == "rowheader"}
    assert {"aiogw", "reasoning"} <= {name for role, name in nodes if role == "heading"}
    live = await browser.run(
        "return [...document.querySelectorAll('[aria-live],[role=status],[role=alert]')].map(e => e.id)"
    )
    assert ["state"] == live
    assert "en" == await browser.run("return document.documentElement.lang")
    await drain(upstream, daemon)


async def test_a_browser_is_told_to_ask_nobody_else(rig: Rig) -> None:
    """Only this very style and script run, only the gateway is asked, and no other page may frame this one."""
    gateway = await rig.gateway(await rig.upstream())
    response = await gateway.admin("/status")
    policy = response.header("content-security-policy") or ""
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert ("'none'", "'self'", "'none'") == (rules["default-src"], rules["connect-src"], rules["frame-ancestors"])
    for kind in ("style-src", "script-src"):
        assert re.fullmatch(r"'sha256-[\w+/]+='", rules[kind])
    assert "no-store" == response.header("cache-control")
    page = response.body.decode()
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert not re.search(r"<[^>]+ (style|on\w+)=", page.partition("<body>")[2].partition("<script>")[0])


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_everything_can_be_read(scheme: int) -> None:
    """The contrast of each text with what is behind it is at least 4.5, as WCAG 2.2 asks for."""
    block = re.findall(r":root \{(.*?)\}", PAGE_CSS.read_text(), re.DOTALL)[scheme]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
    pairs = [
        *(("ink", ground) for ground in ("paper", "card")),
        *(("soft", ground) for ground in ("paper", "card")),
        *((kind, ground) for kind in ("bad", "good") for ground in ("paper", "card")),
        ("stream-ink", "stream"),
        ("first-ink", "first"),
        ("wait-ink", "wait"),
    ]
    for text, ground in pairs:
        light, dark = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground)
