"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");

// ---- names, colors, numbers ----

const PART_NAMES = {
  compute: "compute", optimizer: "optimizer", all_gather: "all-gather (exposed)", reduce_scatter: "reduce-scatter (exposed)",
  all_to_all: "all-to-all (exposed)", broadcast: "broadcast (exposed)", control: "flags and norms (exposed)", pipeline_bubble: "pipeline bubble",
  copies: "copies (exposed)", disk: "disk (exposed)", data_wait: "data wait", evaluation: "evaluation",
  checkpoint: "checkpoint", diagnostics: "diagnostics", other: "other",
};
const SPAN_PARTS = {
  fetch: "copies", copy: "copies", disk_read: "disk", disk_write: "disk", bubble: "pipeline_bubble", clip: "optimizer",
  save: "checkpoint", load: "checkpoint", wait: "pipeline_bubble", F: "compute", B: "optimizer", I: "optimizer", W: "evaluation",
};
const PALETTE = [
  "compute", "optimizer", "all_gather", "copies", "data_wait", "control", "evaluation", "reduce_scatter", "checkpoint",
  "disk", "diagnostics", "broadcast", "all_to_all", "other",
];
const color = (name) => `var(--${name})`;
const nth = (index) => color(PALETTE[index % PALETTE.length]);

function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-4)) return value.toExponential(digits - 1);
  return Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}
function scaled(value, units, base) {
  if (value === null || value === undefined) return "-";
  let index = 0;
  while (Math.abs(value) >= base && index < units.length - 1) { value /= base; index += 1; }
  return `${number(value)} ${units[index]}`;
}
const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"], 1000);
const seconds = (value) => (value === null || value === undefined ? "-"
  : value >= 1 ? `${number(value)} s` : value >= 1e-3 || value === 0 ? `${number(value * 1e3)} ms` : `${number(value * 1e6)} \u00b5s`);
const count = (value) => scaled(value, ["", "k", "M", "G", "T"], 1000).trim();
const operations = (tera) => (tera === null || tera === undefined ? "-" : `${scaled(tera * 1e12, ["", "k", "M", "G", "T", "P"], 1000)}FLOP/s`);
const percent = (value) => (value === null || value === undefined ? "-" : `${number(100 * value)} %`);
const known = (values) => values.filter((value) => value !== null && value !== undefined);
const sum = (values) => known(values).reduce((total, value) => total + value, 0);
function quantile(values, q) {
  const sorted = known(values).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))] : 0;
}
const median = (values) => quantile(values, 0.5);

// ---- elements ----

function make(space, name, attributes, children) {
  const element = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (key === "text") element.textContent = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...(children ?? []).filter((child) => child));
  return element;
}
const tag = (name, attributes, ...children) => make(null, name, attributes, children);
const draw = (name, attributes, ...children) => make("http://www.w3.org/2000/svg", name, attributes, children);

let names = 0;
function section(title, why, half, ...controls) {
  const id = `heading-${(names += 1)}`;
  const body = tag("div");
  const made = tag("section", { class: half ? "half" : null, "aria-labelledby": id },
    tag("div", { class: "title" }, tag("h2", { id, text: title }), ...controls), tag("p", { class: "why", text: why }), body);
  document.getElementById("charts").append(made);
  return body;
}
function table(header, rows, caption) {
  const cell = (name, value, column) => tag(name, {
    class: header[column].number ? "number" : "long", scope: name === "th" ? "col" : null, text: value });
  return tag("div", { class: "scroll" }, tag("table", { "aria-label": caption },
    tag("thead", {}, tag("tr", {}, ...header.map((one, column) => cell("th", one.name, column)))),
    tag("tbody", {}, ...rows.map((row) => tag("tr", {}, ...row.map((value, column) => cell("td", value, column)))))));
}
function legend(entries) {
  return tag("ul", { class: "legend" }, ...entries.map((one) => tag("li", {},
    tag("i", { style: `background:${one.color}` }), tag("span", { text: one.name }),
    one.value ? tag("small", { text: one.value }) : null)));
}
function select(label, options, changed) {
  const box = tag("select", { onchange: () => changed(box.value) }, ...options.map(([value, text]) => tag("option", { value, text })));
  return options.length > 1 ? tag("label", { text: `${label} ` }, box) : null;
}
const redraws = [];
function live(box, build) {
  const again = () => box.replaceChildren(...build(Math.max(320, Math.round(box.clientWidth || 1150))).filter((one) => one));
  redraws.push(again);
  again();
  return again;
}

// ---- charts ----

function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(wanted, 1) || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= rough) ?? 10 * power;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + 1e-9 * step; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}
function frame(width, height, xs, low, high, format, title, description, bars) {
  const left = 68, right = 10, top = 10, bottom = 34, id = `chart-${(names += 1)}`;
  const first = xs[0] ?? 0, last = xs[xs.length - 1] ?? 1;
  const slot = (width - left - right) / Math.max(bars ? xs.length : xs.length - 1, 1);
  const x = (index) => left + slot * (bars ? index + 0.5 : index);
  const y = (value) => top + (height - top - bottom) * (1 - (value - low) / (high - low || 1));
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-labelledby": `${id}-t ${id}-d` },
    draw("title", { id: `${id}-t`, text: title }), draw("desc", { id: `${id}-d`, text: description }));
  for (const value of ticks(low, high, 5)) {
    svg.append(draw("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      draw("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end", text: format(value) }));
  }
  svg.append(draw("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
  const seen = new Set();
  for (const wanted of [first, ...ticks(first, last, Math.max(2, Math.floor(width / 110)))]) {
    const index = xs.findIndex((step) => step >= wanted);
    if (index < 0 || seen.has(index) || [...seen].some((other) => Math.abs(x(other) - x(index)) < 34)) continue;
    seen.add(index);
    svg.append(draw("text", { x: x(index), y: height - bottom + 17, "text-anchor": "middle", text: String(xs[index]) }));
  }
  svg.append(draw("text", { x: (left + width - right) / 2, y: height - 2, "text-anchor": "middle", text: `step ${first} to ${last}` }));
  return { svg, x, y, slot, top, base: height - bottom, left, right: width - right };
}
function marks(view, xs) {
  if (xs !== data.steps) return [];  // other axes are no steps, or not all of them
  const places = new Set((data.deaths?.rows ?? []).map((one) => xs.findIndex((step) => step > one.step)).filter((index) => index >= 0));
  return [...places].map((index) => Math.max(view.left, view.x(index) - view.slot / 2)).map((at) => draw("line", { class: "death", x1: at, x2: at, y1: view.top, y2: view.base }));
}
function follow(view, xs, rows) {
  view.svg.append(...marks(view, xs));
  const cursor = draw("line", { class: "cursor", y1: view.top, y2: view.base, visibility: "hidden" });
  view.svg.append(cursor);
  const area = draw("rect", { x: view.left, y: view.top, width: view.right - view.left, height: view.base - view.top, fill: "transparent" });
  area.addEventListener("pointermove", (event) => {
    const box = view.svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * view.svg.viewBox.baseVal.width;
    let index = 0;
    for (let k = 0; k < xs.length; k += 1) if (Math.abs(view.x(k) - at) < Math.abs(view.x(index) - at)) index = k;
    cursor.setAttribute("x1", view.x(index));
    cursor.setAttribute("x2", view.x(index));
    cursor.setAttribute("visibility", "visible");
    show(event, `step ${xs[index]}`, rows(index));
  });
  area.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); tip.hidden = true; });
  view.svg.append(area);
}
function show(event, title, rows) {
  tip.replaceChildren(tag("b", { text: title }), ...rows.map((one) => tag("div", {},
    tag("span", {}, one.color ? tag("i", { style: `background:${one.color}` }) : null, document.createTextNode(one.name)),
    tag("span", { text: one.value }))));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - box.width - 8)}px`;
  tip.style.top = `${Math.max(8, Math.min(event.clientY + 14, window.innerHeight - box.height - 8))}px`;
}
function lines(width, height, xs, series, format, title, fromZero) {
  const values = known(series.flatMap((one) => one.values));
  let low = fromZero ? 0 : Math.min(...values), high = Math.max(...values);
  if (fromZero && high > 3 * quantile(values, 0.95)) high = 1.3 * quantile(values, 0.95);
  const room = 0.06 * (high - low || Math.abs(high) || 1);
  [low, high] = [fromZero ? 0 : low - room, high + room];
  const described = series.map((one) => `${one.name}: ${format(known(one.values)[0])} first, ${format(known(one.values).at(-1))} last`).join("; ");
  const view = frame(width, height, xs, low, high, format, title, described, false);
  for (const one of series) {
    let path = "", pen = "M";
    one.values.forEach((value, index) => {
      if (value === null || value === undefined) { pen = "M"; return; }
      path += `${pen}${view.x(index).toFixed(1)},${view.y(Math.min(Math.max(value, low), high)).toFixed(1)}`;
      pen = "L";
    });
    view.svg.append(draw("path", { d: path, fill: "none", "stroke-width": 1.8, "stroke-linejoin": "round", style: `stroke:${one.color}` }));
    if (known(one.values).length === 1) {
      const index = one.values.findIndex((value) => value !== null);
      view.svg.append(draw("circle", { cx: view.x(index), cy: view.y(one.values[index]), r: 3.5, style: `fill:${one.color}` }));
    }
  }
  follow(view, xs, (index) => series.map((one) => ({ name: one.name, value: format(one.values[index]), color: one.color })));
  return view.svg;
}
function stack(width, height, xs, series, format, title) {
  const totals = xs.map((_, index) => sum(series.map((one) => one.values[index])));
  const usual = quantile(totals, 0.9);
  const high = 1.05 * (Math.max(...totals) > 2.5 * usual ? 1.4 * usual : Math.max(...totals)) || 1;
  const described = series.map((one) => `${one.name}: median ${format(median(one.values))}`).join("; ");
  const view = frame(width, height, xs, 0, high, format, title, described, true);
  const gap = view.slot > 5 ? Math.min(3, view.slot * 0.2) : 0;
  xs.forEach((_, index) => {
    let below = 0;
    for (const one of series) {
      const value = one.values[index];
      if (!value) continue;
      const bottom = view.y(Math.min(below, high)), up = view.y(Math.min(below + value, high));
      below += value;
      if (bottom - up < 0.05) continue;
      view.svg.append(draw("rect", { x: (view.x(index) - (view.slot - gap) / 2).toFixed(2), y: up.toFixed(2),
        width: Math.max(view.slot - gap, 0.6).toFixed(2), height: (bottom - up).toFixed(2), style: `fill:${one.color}` }));
    }
    if (totals[index] > high) {
      const [at, top] = [view.x(index), view.top];
      view.svg.append(draw("path", { d: `M${at - 4},${top + 1}L${at + 4},${top + 1}L${at},${top - 6}Z`, style: "fill:var(--soft)" }));
    }
  });
  follow(view, xs, (index) => [...series].reverse().filter((one) => one.values[index])
    .map((one) => ({ name: one.name, value: format(one.values[index]), color: one.color }))
    .concat({ name: "total", value: format(totals[index]) }));
  return view.svg;
}

// ---- the page ----

function heading() {
  const facts = data.facts, one = data.summary, head = document.getElementById("head");
  const world = facts.ranks?.world ?? data.ranks.length;
  const button = tag("button", { type: "button", text: "Light / dark", "aria-label": "Switch between light and dark", onclick: () => {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = (root.dataset.theme ?? (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
  } });
  head.append(tag("div", { class: "bar" }, tag("div", {}, tag("h1", { text: `${facts.model?.class ?? "Run"} on ${world} rank${world === 1 ? "" : "s"}` }),
    tag("p", { class: "sub", text: [data.directory, facts.written, `${data.recorded} recorded steps`].filter(Boolean).join(" \u00b7 ") })), button));
  const tile = (name, value, note) => value === "-" ? null : tag("div", { class: "tile" }, tag("dt", { text: name }),
    tag("dd", { text: value }), tag("dd", { class: "note", text: note ?? "" }));
  head.append(tag("dl", { class: "tiles" },
    tile("Step", seconds(one.seconds), "median"), tile("Tokens", count(one.tokens_per_second), "per second"),
    tile("Operations", one.tflops === null ? "-" : count(one.tflops * 1e12), "FLOP/s of each rank"), tile("MFU", percent(one.mfu), "of what a device can do"),
    tile("Waits for ranks", percent(one.waits), "of a step"), tile("Memory", bytes(one.memory), "peak of a rank"),
    tile("Loss", number(one.loss, 4), "last"),
    tile("Goodput", percent(data.deaths?.goodput), `${data.deaths?.count} death${data.deaths?.count === 1 ? "" : "s"}`)));
  const model = facts.model ?? {}, layout = facts.ranks ?? {};
  const chips = {
    parameters: model.parameters && `${count(model.parameters)}${model.trainable !== model.parameters ? `, ${count(model.trainable)} trained` : ""}`,
    units: model.units, device: facts.device, optimizer: facts.optimizers?.join(", "),
    stage: facts.config?.find((row) => row[0] === "stage")?.[1],
    ranks: layout.world && `${layout.shard} sharded${layout.replicate > 1 ? ` x ${layout.replicate} copies` : ""}${layout["pipeline stages"] > 1 ? ` x ${layout["pipeline stages"]} stages` : ""}`,
    versions: facts.versions && Object.entries(facts.versions).map(([name, version]) => `${name} ${version}`).join(", "),
  };
  head.append(tag("dl", { class: "facts" }, ...Object.entries(chips).filter(([, value]) => value)
    .map(([name, value]) => tag("div", {}, tag("dt", { text: name }), tag("dd", { text: String(value) })))));
}

function loss() {
  if (!known(data.loss).length) return;
  const box = section("Loss", "Mean over the ranks.", true);
  live(box, (width) => [lines(width, 250, data.steps, [{ name: "loss", values: data.loss, color: color("compute") }], (v) => number(v, 4), "Loss by step")]);
}

function speed() {
  const tokens = known(data.tokens_per_second).length > 0;
  const values = tokens ? data.tokens_per_second : data.tflops;
  if (!known(values).length) return;
  const what = tokens ? "Tokens per second" : "Operations per second";
  const box = section(what, tokens ? "Of all ranks together." : "Of one rank, their mean.", true);
  const shown = [{ name: what.toLowerCase(), values, color: color("optimizer") }];
  live(box, (width) => [lines(width, 250, data.steps, shown, tokens ? count : operations, `${what} by step`, true)]);
}

function budget() {
  let chosen = "mean";
  const pick = select("Rank", [["mean", "mean of all"], ...data.ranks.map((rank) => [String(rank), String(rank)])], (value) => { chosen = value; again(); });
  const box = section("Where the time of a step goes",
    "What the thread that trains does or waits for; the parts add up to the step. Communication, copies and disk count only where they are waited for.", false, pick);
  const again = live(box, (width) => {
    const ranks = chosen === "mean" ? data.ranks : [Number(chosen)];
    const series = data.parts.map((part) => ({
      name: PART_NAMES[part] ?? part, color: color(part),
      values: data.steps.map((_, index) => { const found = known(ranks.map((rank) => data.budget[rank][part][index])); return found.length ? sum(found) / found.length : 0; }),
    }));
    const all = sum(series.map((one) => sum(one.values.slice(data.steps.length > 1 ? 1 : 0)))) || 1;
    return [stack(width, 320, data.steps, series, seconds, "Seconds of a step by part"),
      legend(series.map((one) => ({ ...one, value: percent(sum(one.values.slice(data.steps.length > 1 ? 1 : 0)) / all) })))];
  });
}

function memory() {
  const ranks = data.ranks.filter((rank) => data.memory[rank].steps.length);
  if (!ranks.length) return;
  const tiers = ["device", "host", "nvme"].filter((tier) => ranks.some((rank) => data.memory[rank].tiers[tier]));
  const choices = ranks.flatMap((rank) => tiers.filter((tier) => data.memory[rank].tiers[tier]).map((tier) => [`${rank} ${tier}`, `rank ${rank}, ${tier}`]));
  let chosen = choices[0]?.[0];
  if (chosen) {
    const pick = select("Show", choices, (value) => { chosen = value; again(); });
    const box = section("Memory by category", "What the ledger knows of between steps: state, buffers, staging. Activations are not in it.", true, pick);
    const again = live(box, (width) => {
      const [rank, tier] = chosen.split(" "), found = data.memory[rank];
      const series = Object.entries(found.tiers[tier]).map(([name, values], index) => ({ name, values, color: nth(index) }));
      return [stack(width, 270, found.steps, series, bytes, `Bytes by category, rank ${rank}, ${tier}`),
        legend(series.map((one) => ({ ...one, value: bytes(one.values.at(-1)) })))];
    });
  }
  const device = ranks.some((rank) => known(data.memory[rank].allocated).length);
  const shown = ranks.map((rank, index) => ({ name: `rank ${rank}`, color: nth(index), values: data.memory[rank][device ? "allocated" : "resident"] }));
  const box = section("Memory by rank", device ? "What the device's allocator has given out." : "What of each process lies in memory, Python and its libraries included.", true);
  live(box, (width) => [lines(width, 270, data.memory[ranks[0]].steps, shown, bytes, "Bytes of each rank", false), legend(shown)]);
}

function skew() {
  if (data.ranks.length < 2) return;
  const box = section("How far ranks are apart", "Seconds of a step in which a rank works and waits for no other one. Who is above the others is who they wait for.", true);
  const shown = data.ranks.map((rank, index) => ({ name: `rank ${rank}`, color: nth(index), values: data.own[rank] }));
  live(box, (width) => [lines(width, 270, data.steps, shown, seconds, "Own work of each rank", true),
    legend(shown.map((one) => ({ ...one, value: seconds(median(one.values)) })))]);
}

function traffic() {
  if (!data.flows.length) return;
  const box = section("What moves", "Of one rank in a step, in the background or not; the rate is that while something of the kind was under way.", true);
  box.append(table([{ name: "kind" }, { name: "calls", number: true }, { name: "bytes", number: true }, { name: "rate", number: true }],
    data.flows.map((one) => [one.kind.replaceAll("_", " "), number(one.calls), bytes(one.bytes), one.rate === null ? "-" : `${bytes(one.rate)}/s`]), "What moves in a step"));
}

function experts() {
  if (!data.experts.length) return;
  const box = section("Experts", "Rows for the experts of each layer over all recorded steps and ranks. Ranks of the least busy experts wait for those of the busiest.", true);
  const row = ({ layer, rows }) => {
    const mean = rows.reduce((sum, one) => sum + one, 0) / rows.length;
    return [layer, number(rows.length), number(Math.min(...rows)), number(mean), number(Math.max(...rows)), number(Math.max(...rows) / (mean || 1))];
  };
  box.append(table([{ name: "layer" }, ...["experts", "fewest", "mean", "most", "most / mean"].map((name) => ({ name, number: true }))],
    data.experts.map(row), "Rows of experts"));
  live(box, (width) => data.experts.slice(0, 8).map(({ layer, rows }) => lines(width, 160, rows.map((_, index) => index), [{ name: layer, color: nth(0), values: rows }], number, `Rows by expert of ${layer}`, false)));
}

function chosen() {
  const found = data.chosen;
  if (!found) return;
  const box = section("Chosen settings", found.said);
  const held = (one) => ["host", "nvme"].filter((tier) => one.bytes[tier]).map((tier) => ` + ${bytes(one.bytes[tier])} ${tier}`).join("");
  box.append(table([{ name: "settings" }, { name: "rows x micro-batches" }, { name: "memory of a rank" }, { name: "seconds", number: true }, { name: "" }],
    found.rows.map((one) => [one.said, one.batch, bytes((one.bytes.device ?? 0) + one.activations) + held(one), seconds(one.seconds), one.why]), "Candidates"));
}

function deaths() {
  const found = data.deaths;
  if (!found) return;
  const box = section("Deaths and new beginnings", `${found.said}${found.rows.length ? " Dashed lines in charts by step are new beginnings." : ""}`);
  if (!found.rows.length) return;
  const places = (list) => (list.length ? list.join(", ") : "-");
  const header = [{ name: "time (UTC)" }, { name: "after step", number: true }, { name: "places gone" }, { name: "places new" },
    ...["ranks before", "ranks after", "stall", "steps again"].map((name) => ({ name, number: true })), { name: "why" }];
  box.append(table(header, found.rows.map((one) => [new Date(1e3 * one.time).toISOString().slice(0, 19).replace("T", " "), String(one.step),
    places(one.went), places(one.came), String(one.before), String(one.after), seconds(one.stall), String(one.again), one.why]), "New beginnings"));
}

function timeline() {
  const found = data.timeline;
  if (!found) return;
  const title = found.pipeline ? "Pipeline timeline" : "Timeline of a step";
  const box = section(`${title} (step ${found.step})`, found.pipeline
    ? "Who computes which micro-batch when: F forward, B backward, I and W its halves; what is pale is waiting."
    : "What each rank did: phases, what its training thread waited for, and what moved in the background.");
  const rows = [];
  for (const [rank, intervals] of Object.entries(found.ranks)) {
    const there = [...new Set(intervals.map((one) => one[1]))];
    const order = ["phase", "training", "pipeline"];
    const chosen = found.pipeline ? ["pipeline"] : [...order.filter((row) => there.includes(row)), ...there.filter((row) => !order.includes(row)).sort()];
    chosen.forEach((row, index) => rows.push({ rank, row, first: index === 0, found: intervals.filter((one) => one[1] === row) }));
  }
  const end = Math.max(...rows.flatMap((row) => row.found.map((one) => one[3])), 1e-6);
  const begin = Math.min(...rows.flatMap((row) => row.found.map((one) => one[2])), end);
  live(box, (width) => {
    const left = 150, line = 22, height = rows.length * line + 40, id = `chart-${(names += 1)}`;
    const x = (ms) => left + ((width - left - 10) * (ms - begin)) / (end - begin || 1);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-labelledby": `${id}-t ${id}-d` },
      draw("title", { id: `${id}-t`, text: title }),
      draw("desc", { id: `${id}-d`, text: `${rows.length} rows over ${number(end - begin)} milliseconds` }));
    for (const ms of ticks(0, end - begin, Math.floor(width / 130))) {
      svg.append(draw("line", { class: "grid", x1: x(ms + begin), x2: x(ms + begin), y1: 4, y2: height - 30 }),
        draw("text", { x: x(ms + begin), y: height - 14, "text-anchor": "middle", text: `${number(ms)} ms` }));
    }
    rows.forEach((row, index) => {
      const top = 6 + index * line;
      if (row.first && index) svg.append(draw("line", { class: "axis", x1: 0, x2: width, y1: top - 2, y2: top - 2 }));
      if (row.first) svg.append(draw("text", { class: "rank", x: 0, y: top + 14, text: `rank ${row.rank}` }));
      if (!found.pipeline) svg.append(draw("text", { x: left - 8, y: top + 14, "text-anchor": "end", text: row.row.replace(" in the background", " (thread)").replaceAll("_", " ") }));
      for (const [name, , start, stop, detail] of row.found) {
        const kind = name.replace(/\d+$/, ""), part = SPAN_PARTS[kind] ?? (PART_NAMES[kind] ? kind : "other"), wide = x(stop) - x(start);
        const rect = draw("rect", { x: x(start).toFixed(2), y: top, width: Math.max(wide, 0.7).toFixed(2), height: line - 4, rx: wide > 6 ? 3 : 0, style: `fill:${color(part)}` });
        rect.addEventListener("pointermove", (event) => show(event, name.replaceAll("_", " "), [
          { name: "takes", value: seconds((stop - start) / 1e3) }, { name: "begins at", value: `${number(start - begin)} ms` }, ...(detail ? [{ name: detail, value: "" }] : [])]));
        rect.addEventListener("pointerleave", () => { tip.hidden = true; });
        svg.append(rect);
        const text = kind === "wait" || row.row === name ? "" : name.replaceAll("_", " ");
        if (text && wide > 7 * text.length + 4) svg.append(draw("text", { class: "on", x: x(start) + wide / 2, y: top + 13, "text-anchor": "middle", text }));
      }
    });
    return [svg, found.left_out > 0 ? tag("p", { class: "note", text: `The ${found.left_out} shortest intervals are left out; zero-strategy trace has them all.` }) : null];
  });
}

function settings() {
  const rows = data.facts.config;
  if (!rows?.length) return;
  const box = section("Settings", "What the run was configured with, and where each value came from.");
  const own = rows.filter((row) => row[2] !== "default"), header = [{ name: "key" }, { name: "value" }, { name: "origin" }];
  if (own.length) box.append(table(header, own, "Settings that are not the default"));
  box.append(tag("details", {}, tag("summary", { text: `All ${rows.length} settings` }), table(header, rows, "All settings")));
}

heading();
for (const part of [budget, loss, speed, memory, skew, traffic, experts, deaths, timeline, chosen, settings]) part();
if (data.grouped > 1) document.getElementById("foot").append(tag("p", { text: `Each point is the mean of ${data.grouped} recorded steps.` }));
document.getElementById("foot").append(tag("p", { text: "Written by zero-strategy report; the page needs no network." }));
let waiting = 0, last = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === last) return;
  last = window.innerWidth;
  clearTimeout(waiting);
  waiting = setTimeout(() => redraws.forEach((again) => again()), 120);
});
document.documentElement.dataset.drawn = "true";
