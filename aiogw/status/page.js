"use strict";
(() => {
  const MOST_PLACES = 50, MANY = 48, STALE_SECONDS = 6, REOPEN_SECONDS = 10;
  // Words and columns are page.py's, which puts them before this script.
  const {phases: PHASES, endings: ENDINGS, running: RUNNING, waiting: WAITING, ended: ENDED, newcomers: NEWCOMERS, leaves: LEAVES, reload: RELOAD} = WORDS;
  const state = document.getElementById("state");
  const main = document.querySelector("main");
  const upstreams = document.getElementById("upstreams");
  const endings = document.getElementById("endings");
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  let told = null, skew = 0, heardAt = performance.now(), shownOf = 0, lost = false, asked = false, drawn = false, planned = false, source;
  const sections = new Map(), chips = new Map();

  // -- the feed: a snapshot, then JSON merge patches (RFC 7396)
  const isObject = value => value !== null && typeof value === "object" && !Array.isArray(value);
  const merge = (old, patch) => {
    for (const [name, value] of Object.entries(patch)) {
      if (value === null) delete old[name];
      else if (isObject(value)) old[name] = merge(isObject(old[name]) ? old[name] : {}, value);
      else old[name] = value;
    }
    return old;
  };
  const heard = document_ => {
    told = document_;
    heardAt = performance.now();
    lost = false;
    skew = told.time - Date.now() / 1000;
    if (!planned) { planned = true; requestAnimationFrame(draw); }
  };
  const open = () => {
    if (source) source.close();
    source = new EventSource("status/events");
    source.addEventListener("snapshot", event => { asked = false; heard(JSON.parse(event.data)); });
    source.addEventListener("change", event => told && heard(merge(told, JSON.parse(event.data))));
    // An error status: enough are watching perhaps, and a look now and then is had all the same.
    source.addEventListener("error", () => source.readyState === EventSource.CLOSED ? ask() : lose());
  };
  const lose = () => { lost = true; draw(); };
  const ask = () => fetch("status.json").then(response => response.json()).then(document_ => { asked = true; heard(document_); }, lose);
  const silent = () => (performance.now() - heardAt) / 1000;
  let openedAt = performance.now();
  const look = () => {
    // A browser gives up for good after an error status, and may take a dead connection for a quiet one.
    const triedSeconds = (performance.now() - openedAt) / 1000;
    if (triedSeconds > 2 && (source.readyState === EventSource.CLOSED || Math.min(silent(), triedSeconds) > REOPEN_SECONDS)) {
      openedAt = performance.now();
      open();
    }
    draw();
  };

  // -- how figures are written (figures.py has the same rules)
  const two = n => String(n).padStart(2, "0");
  const seconds = value => {
    if (value < 9.95) return Math.max(0, value).toFixed(1) + " s";
    const whole = Math.round(value);
    if (whole < 60) return whole + " s";
    if (whole < 3600) return Math.floor(whole / 60) + ":" + two(whole % 60) + " min";
    return Math.floor(whole / 3600) + ":" + two(Math.floor(whole % 3600 / 60)) + " h";
  };
  const shortSeconds = value => {
    const whole = Math.max(0, Math.floor(value));
    return whole < 100 ? whole + "s" : whole < 6000 ? Math.floor(whole / 60) + "m" : Math.floor(whole / 3600) + "h";
  };
  const size = value => {
    for (const unit of ["B", "kB", "MB"]) {
      if (value < 999.5) return value.toFixed(unit !== "B" && value < 9.95 ? 1 : 0) + " " + unit;
      value /= 1000;
    }
    return value.toFixed(1) + " GB";
  };
  const clock = unix => new Date(unix * 1000).toTimeString().slice(0, 8);
  const since = (unix, now) => now - unix < 43200 ? clock(unix)
    : new Date(unix * 1000).toLocaleDateString("en-GB", {day: "2-digit", month: "short"}) + " " + clock(unix).slice(0, 5);
  const about = (one, value) => (one.estimates_measured ? "≈ " : "perhaps ") + seconds(value);
  const newcomerText = one => {
    const wait = one.newcomer_wait_seconds, limit = one.queue_timeout_seconds;
    if (one.newcomer !== "waits") return NEWCOMERS[one.newcomer];
    if (wait === undefined) return "waits";
    return one.estimates_measured && wait > limit ? "waits " + seconds(limit) + " in vain" : "waits " + about(one, wait);
  };
  const estimateText = (one, row, now) => {
    const wait = row.estimated_seconds, left = (row.deadline_at ?? Infinity) - now;
    if (wait === undefined) return "-";
    return one.estimates_measured && wait > left ? "times out in " + seconds(left) : about(one, wait);
  };
  const waited = (p50, p95, most, others) => most < .05 ? "all" + others + " got a slot at once" : p95 < .05 ? "95% got a slot at once"
    : (p50 < .05 ? "half got a slot at once, 95% waited" : "half waited ≤ " + seconds(p50) + ", 95%") + " ≤ " + seconds(p95);
  const waitsText = one => [
    one.wait_p50_seconds === undefined ? ""
      : waited(one.wait_p50_seconds, one.wait_p95_seconds, one.wait_max_seconds, one.waits_in_vain || one.refused_by_queue ? " others" : ""),
    one.waits_in_vain ? one.waits_in_vain + " gave up or timed out" : "",
    one.refused_by_queue ? one.refused_by_queue + " refused by the queue" : "",
    one.newcomer_wait_seconds === undefined && one.newcomer === "waits" ? "nothing has ended yet" : "",
  ].filter(Boolean).join("; ") || "no requests";
  const slotsMore = one => one.cap === undefined ? "no limit" : [
    one.configured_cap !== one.cap ? "(" + one.configured_cap + " with all endpoints)" : "",
    one.slots_settling ? one.slots_settling + " settling" : "",
  ].filter(Boolean).join(", ");
  const nextText = one => {
    const needs = one.next_needs_slots ?? 1, free = (one.cap ?? 0) - one.slots_in_use - one.slots_settling;
    return needs === 1 || free < 1 ? "" : "next in line needs " + needs + " slots" + (free < needs ? "" : " at one endpoint")
      + ", " + free + (free === 1 ? " is" : " are") + " free";
  };
  const timesText = row => row.sequences > 1 ? " ×" + row.sequences : "";
  const endpointText = (at, now) => [
    at.left_out ? "left out" : "",
    at.unreached_since === undefined ? "" : "not reached since " + since(at.unreached_since, now),
    at.slots_in_use + (at.slots === undefined ? " in use" : " of " + at.slots),
  ].filter(Boolean).join(", ");

  // -- elements; text is only ever set as text
  const make = (tag, kind, ...inside) => {
    const element = document.createElement(tag);
    if (kind) element.className = kind;
    element.append(...inside);
    return element;
  };
  const setText = (element, text) => { if (element.textContent !== text) element.textContent = text; };
  const setKind = (element, kind) => { if (element.className !== kind) element.className = kind; };
  const fit = (parent, count, create) => {
    while (parent.children.length > count) parent.lastChild.remove();
    while (parent.children.length < count) parent.append(create());
  };
  const svg = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };

  class Table {
    constructor(caption, columns) {
      this.body = make("tbody");
      const head = make("tr");
      for (const [name, kind] of columns) {
        const cell = make("th", kind, name);
        cell.scope = "col";
        head.append(cell);
      }
      this.element = make("div", "list", make("table", "", make("caption", "", caption), make("thead", "", head), this.body));
      this.columns = columns;
    }
    show(rows) {
      this.element.hidden = !rows.length;
      fit(this.body, rows.length, () => {
        const row = make("tr");
        this.columns.forEach(([, kind], number) => {
          const cell = make(number ? "td" : "th", kind, make("span"));
          if (!number) cell.scope = "row";
          row.append(cell);
        });
        return row;
      });
      rows.forEach((values, number) => values.forEach((value, column) => {
        const span = this.body.children[number].children[column].firstChild;
        const [kind, text] = Array.isArray(value) ? value : ["", value];
        setKind(span, kind);
        setText(span, text);
        if (!column && span.title !== text) span.title = text;
      }));
    }
  }
  const origin = row => [row.id, row.key || "-", row.surface, row.model || "-"];

  class Tile {
    constructor(name, lines) {
      this.value = make("strong");
      this.more = make("small");
      this.under = lines ? make("small", "scale") : make("p", "waits");
      const figure = make("dd", "", this.value, this.more);
      if (lines) {
        this.area = svg("path", {});
        this.line = svg("polyline", {});
        const picture = svg("svg", {class: "spark", viewBox: "0 0 150 30", preserveAspectRatio: "none", "aria-hidden": "true"});
        picture.append(this.area, this.line);
        figure.append(picture);
      }
      figure.append(this.under);
      this.element = make("div", "", make("dt", "", name), figure);
    }
    show(value, more, samples, atLeast, write = String) {
      setText(this.value, value);
      setText(this.more, more);
      if (!samples) return;
      setText(this.under, "max " + write(Math.max(0, ...samples)) + " · 5 min");
      if (!samples.length) return;
      const top = Math.max(atLeast, ...samples), start = 151 - samples.length;
      const points = samples.map((one, i) => start + i + "," + (30 - 28 * one / top).toFixed(1)).join(" ");
      if (this.points === points) return;
      this.points = points;
      this.line.setAttribute("points", points);
      this.area.setAttribute("d", "M" + start + ",30 L" + points + " L150,30 Z");
    }
  }

  class Upstream {
    constructor(name) {
      this.slots = make("ol", "cells slots");
      this.queue = make("ol", "cells queue");
      this.queueName = make("span", "", "Queue");
      this.drawing = make("div", "drawing", make("span", "", "Slots"), this.slots, this.queueName, this.queue);
      this.drawing.setAttribute("role", "img");
      this.leaves = make("p", "leaves");
      this.endpoints = make("ul", "endpoints");
      this.endpoints.setAttribute("aria-label", "Endpoints");
      this.inUse = new Tile("Slots in use", true);
      this.inQueue = new Tile("In the queue", true);
      this.oldest = new Tile("Oldest wait", true);
      this.newcomer = new Tile("A newcomer", false);
      const tiles = [this.inUse, this.inQueue, this.oldest, this.newcomer];
      this.running = new Table("At work", RUNNING);
      this.waiting = new Table("Waiting", WAITING);
      this.element = make(
        "section", "", make("div", "head", make("h2", "", name), this.leaves, this.endpoints), this.drawing,
        make("dl", "tiles", ...tiles.map(tile => tile.element)), this.running.element, this.waiting.element,
      );
      this.element.dataset.upstream = name;
      this.cells = [];
    }

    show(one, rows, now) {
      const gated = one.cap !== undefined;
      setText(this.leaves, one.leaving ? LEAVES : "");
      const waiting = rows.filter(row => row.phase === "queue");
      const others = rows.filter(row => row.phase !== "queue");
      const used = one.slots_in_use + one.slots_settling;
      const places = Object.entries(one.endpoints);
      fit(this.endpoints, places.length, () => make("li"));
      places.forEach(([address, at], i) => {
        setKind(this.endpoints.children[i], at.up ? "" : "out");
        const text = (at.up ? "" : "✕ ") + address + " " + endpointText(at, now);
        if (this.endpoints.children[i].dataset.text !== text) {
          this.endpoints.children[i].dataset.text = text;
          this.endpoints.children[i].replaceChildren(...(at.up ? [make("b", "", "● "), text] : [text]));
        }
      });
      this.showSlots(one, others, now);
      this.queue.hidden = this.queueName.hidden = !one.queue_limit && !one.waiting;
      this.drawing.hidden = !gated && !used;
      if (gated) this.showQueue(one, waiting, now);
      const slotsText = used + (gated ? " of " + one.cap : "");
      const queueText = one.waiting + " of " + one.queue_limit;
      const label = slotsText + " slots in use" + (gated ? ", " + queueText + " places in the queue taken" : "");
      if (this.drawing.getAttribute("aria-label") !== label) this.drawing.setAttribute("aria-label", label);

      const samples = Object.entries(one.history).sort((a, b) => a[0] - b[0]).map(entry => entry[1]);
      this.inUse.show(slotsText, slotsMore(one), samples.map(s => s[0]), gated ? one.cap : 1);
      for (const tile of [this.inQueue, this.oldest, this.newcomer]) tile.element.hidden = !gated;
      if (gated) {
        setKind(this.inQueue.element, one.newcomer === "queue_full" ? "full" : "");
        this.inQueue.show(queueText, "at most " + seconds(one.queue_timeout_seconds) + " each", samples.map(s => s[1]), 1);
        this.oldest.show(one.waiting ? seconds(now - one.waiting_since) : "nobody waits", nextText(one), samples.map(s => s[2]), 1, seconds);
        setKind(this.newcomer.element, one.newcomer === "runs" || one.newcomer === "waits" ? "" : "full");
        this.newcomer.show(newcomerText(one), "");
        setText(this.newcomer.under, "last 5 min: " + waitsText(one));
      }
      this.running.show(others.map(row => [
        ...origin(row), PHASES[row.phase] + timesText(row), seconds(now - row.arrived_at),
        row.last_byte_at === undefined ? "-" : seconds(now - row.last_byte_at), size(row.bytes),
      ]));
      this.waiting.show(waiting.map(row => [
        ...origin(row), row.position + timesText(row), seconds(now - row.arrived_at), estimateText(one, row, now),
      ]));
    }

    // Whoever has a cell keeps it: neighbours that end do not make it wander.
    showSlots(one, rows, now) {
      const holding = new Map(rows.filter(row => row.phase !== "finish" && row.sequences).map(row => [row.number, row]));
      const cells = this.cells.map(number => holding.has(number) ? number : null);
      const missing = [...holding.values()].filter(row => !cells.includes(row.number));
      for (const row of missing) {
        for (let i = 0; i < row.sequences; i++) {
          const free = cells.indexOf(null);
          if (free < 0) cells.push(row.number); else cells[free] = row.number;
        }
      }
      while (cells.length && cells[cells.length - 1] === null) cells.pop();
      this.cells = cells;
      const taken = cells.filter(number => number !== null).length;
      const total = Math.max(one.cap || 0, taken + one.slots_settling, cells.length);
      setKind(this.slots, "cells slots" + (total > MANY ? " many" : ""));
      fit(this.slots, total, () => make("li"));
      let settling = one.slots_settling;
      const seen = new Set();
      for (let i = 0; i < total; i++) {
        const frame = this.slots.children[i], row = holding.get(cells[i]);
        setKind(frame, !row && settling-- > 0 ? "settling" : "");
        if (!row) frame.replaceChildren();
        else if (seen.has(row.number)) {
          const kind = "tail " + row.phase;
          if (!frame.firstChild || frame.firstChild.className !== kind) frame.replaceChildren(make("span", kind));
          frame.firstChild.title = titleOf(row);
        } else {
          seen.add(row.number);
          put(frame, chip(row, now - row.granted_at));
        }
      }
    }

    showQueue(one, rows, now) {
      const shown = rows.slice(0, MOST_PLACES), more = one.waiting - shown.length;
      const places = Math.max(shown.length, Math.min(one.queue_limit, MOST_PLACES));
      fit(this.queue, places + (more > 0 ? 1 : 0), () => make("li"));
      for (let i = 0; i < places; i++) {
        setKind(this.queue.children[i], "");
        if (i < shown.length) put(this.queue.children[i], chip(shown[i], now - shown[i].entered_at));
        else this.queue.children[i].replaceChildren();
      }
      if (more > 0) {
        setKind(this.queue.children[places], "more");
        setText(this.queue.children[places], "and " + more + " more");
      }
    }
  }

  const put = (frame, element) => { if (frame.firstChild !== element) frame.replaceChildren(element); };
  const chip = (row, age) => {
    let element = chips.get(row.number);
    if (!element) chips.set(row.number, element = make("span"));
    setKind(element, "chip " + (row.phase === "queue" ? "queue_" : row.phase));
    setText(element, shortSeconds(age));
    if (element.title !== titleOf(row)) element.title = titleOf(row);
    return element;
  };
  const titleOf = row => row.id + ", " + (row.model || "-") + ", " + PHASES[row.phase];

  const draw = () => {
    planned = false;
    const stale = lost || silent() > STALE_SECONDS;
    main.classList.toggle("stale", stale);
    const asOf = told ? clock(told.time) : "";
    if (stale) {
      setKind(state, "stale");
      setText(state, !told ? "the gateway does not answer, trying again"
        : lost ? "connection lost, trying again; as of " + asOf : "nothing heard since " + asOf + ", trying again");
    }
    if (!told) return;
    if (!stale) { setKind(state, told.draining ? "draining" : "live"); setText(state, told.draining ? "shutting down" : asked ? "enough are watching; as of " + asOf : "live"); }
    if ((stale && shownOf === heardAt) || document.hidden) return;
    shownOf = heardAt;
    const now = stale ? told.time : Date.now() / 1000 + skew;
    setText(document.getElementById("about"), told.version + ", up " + seconds(now - told.started_at));
    const before = new Map();
    if (drawn && !calm.matches) for (const [number, element] of chips) before.set(number, element.getBoundingClientRect());
    if (!drawn) { upstreams.replaceChildren(); endings.replaceChildren(); endings.append(ended.element, nothing); }
    drawn = true;
    for (const [name, section] of sections) if (!told.upstreams[name]) { section.element.remove(); sections.delete(name); }
    const rows = Object.entries(told.requests).map(([number, row]) => ({number, ...row})).sort((a, b) => a.number - b.number);
    for (const number of [...chips.keys()]) if (!told.requests[number]) chips.delete(number);
    let used = 0, cap = 0, waiting = 0;
    setText(document.getElementById("reload"), told.reload_successful ? "" : RELOAD);
    // A change says what is new, and not in which order.
    for (const [name, one] of Object.entries(told.upstreams).sort((a, b) => a[1].rank - b[1].rank)) {
      if (!sections.has(name)) sections.set(name, new Upstream(name));
      const {element} = sections.get(name), before = upstreams.children[one.rank] ?? null;
      if (before !== element) upstreams.insertBefore(element, before);
      sections.get(name).show(one, rows.filter(row => row.upstream === name), now);
      if (one.cap !== undefined) { used += one.slots_in_use + one.slots_settling; cap += one.cap; waiting += one.waiting; }
    }
    const title = used + "/" + cap + (waiting ? " +" + waiting : "") + " aiogw";
    if (document.title !== title) document.title = title;
    const last = Object.entries(told.endings).sort((a, b) => b[0] - a[0]).map(entry => entry[1]);
    nothing.hidden = last.length > 0;
    ended.show(last.map(row => [
      row.id, clock(row.ended_at),
      [row.outcome === "completed" ? "ok" : row.outcome === "client_gone" ? "left" : "bad", ENDINGS[row.outcome] || row.outcome.replaceAll("_", " ")],
      row.upstream || "-", row.key || "-", row.model || "-",
      row.wait_seconds === undefined ? "-" : seconds(row.wait_seconds),
      row.duration_seconds === undefined ? "-" : seconds(row.duration_seconds),
    ]));
    for (const [number, element] of chips) {
      const from = before.get(number);
      if (calm.matches || !element.isConnected) continue;
      // Whoever is still on the way goes on from where it is seen, to where it is now.
      for (const one of element.getAnimations()) if (!(one instanceof CSSTransition)) one.cancel();
      if (!from || !from.width) { element.animate([{opacity: 0}, {opacity: 1}], 200); continue; }
      const to = element.getBoundingClientRect(), x = from.left - to.left, y = from.top - to.top;
      if (x || y) element.animate([{transform: `translate(${x}px, ${y}px)`}, {transform: "none"}], {duration: 280, easing: "ease-out"});
    }
  };
  const ended = new Table("The last endings", ENDED);
  const nothing = make("p", "none", "Nothing has ended yet.");
  document.addEventListener("visibilitychange", draw);
  setInterval(look, 1000);
  open();
})();
