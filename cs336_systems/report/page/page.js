"use strict";
// Everything that a reader can do with the page. Texts and data come from the page itself; nothing is requested from outside.

async function inflated(id) {
  const text = document.getElementById(`packed-${id}`).textContent;
  const bytes = Uint8Array.fromBase64?.(text) ?? Uint8Array.from(atob(text), (char) => char.charCodeAt(0)); // the first is fifty times as fast
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
}

const unpack = async (id) => (await inflated(id)).text();

async function load(id) { // a library that the page carries with it
  const url = URL.createObjectURL(new Blob([await unpack(id)], { type: "text/javascript" }));
  try { return await import(url); } finally { URL.revokeObjectURL(url); }
}

const once = (make) => { let made; return () => (made ??= make()); };
const has = (id) => document.getElementById(`packed-${id}`) !== null;
const unpacked = (id) => once(async () => JSON.parse(await unpack(id)));
const figures = unpacked("figures"), copies = unpacked("copies"), runs = unpacked("runs");
let loaded = null; // plotly and what it draws, once they are there: then a figure is drawn at once, as print needs it
const drawing = once(async () => {
  const [all, numbers] = await Promise.all([figures(), inflated("numbers").then((found) => found.arrayBuffer()), load("plotly")]);
  return (loaded = { library: window.Plotly, all, numbers: new Uint8Array(numbers) });
});

function say(text) {
  const place = document.getElementById("page-message");
  place.textContent = text;
  place.classList.add("shown");
  clearTimeout(say.timer);
  say.timer = setTimeout(() => place.classList.remove("shown"), 2500);
}

// Tables sort, filter, hide columns and are copied.

const known = (text) => text !== "" && text !== null && text !== undefined;
const byValue = (sign) => (a, b) => known(a) && known(b) ? sign * (a - b) : known(b) - known(a); // what is not known comes last
const words = new Intl.Collator("en", { numeric: true });

const tables = once(async () => {
  const library = (await load("tables")).default;
  library.type("value", "order", { asc: byValue(1), desc: byValue(-1) });
  library.type("words", "order", { asc: words.compare, desc: (a, b) => words.compare(b, a) });
  return library;
});

const made = new Map(); // tables by the identifiers of their blocks

async function makeTable(block) {
  const element = block.querySelector("table"), heads = [...element.tHead.rows[0].cells];
  if (made.has(block.id)) return;
  if (!has("tables")) return;
  const library = await tables();
  const table = new library(element, {
    paging: false, info: false, order: [], autoWidth: false, orderMulti: true,
    layout: { topStart: null, topEnd: null, bottomStart: null, bottomEnd: null },
    columnDefs: heads.map((head, i) => ({ targets: i, type: head.classList.contains("number") ? "value" : "words" })),
    language: { zeroRecords: "No row has this text.", emptyTable: "There are no rows." },
  });
  made.set(block.id, table);
  const tools = document.getElementById("page-tools").content.firstElementChild.cloneNode(true), filter = tools.querySelector("input");
  filter.ariaLabel = `Filter the rows of: ${block.querySelector("h3").textContent}`;
  filter.addEventListener("input", (event) => table.search(event.target.value).draw());
  table.columns().every(function () {
    const label = document.createElement("label"), box = document.createElement("input");
    Object.assign(box, { type: "checkbox", checked: true });
    box.addEventListener("change", () => this.visible(box.checked));
    label.append(box, ` ${heads[this.index()].textContent.trim()}`);
    tools.querySelector(".columns").append(label);
  });
  for (const button of tools.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => {
      const seen = { rows: table.rows({ search: "applied", order: "applied" }).indexes().toArray(), columns: table.columns(":visible").indexes().toArray() };
      const name = button.dataset.copy, all = table.rows().count();
      const copied = await copy(written((await copies())[block.id][name], seen, heads.length));
      button.closest("details").open = false;
      if (!copied) return say("The browser does not let this page copy.");
      if (seen.rows.length === all && seen.columns.length === heads.length) return say(`Copied the whole table as ${name}.`);
      say(`Copied ${seen.rows.length} of ${all} rows and ${seen.columns.length} of ${heads.length} columns as ${name}.`);
    });
  }
  block.querySelector(".head").append(tools);
}

function written(lines, seen, count) { // the rows and columns that are seen, in their order
  if (lines.whole !== undefined && seen.columns.length === count && seen.rows.length === lines.rows.length && seen.rows.every((row, i) => row === i)) return lines.whole;
  const places = lines.columns ? lines.columns.flatMap((own, i) => own === null || seen.columns.includes(own) ? [i] : []) : seen.columns;
  const line = (own) => {
    if (typeof own === "string") return own;
    const [before, between, after, parts] = own;
    return before + (between === null ? places.length : places.map((i) => parts[i]).join(between)) + after;
  };
  return [...lines.head, ...seen.rows.map((row) => lines.rows[row]), ...lines.foot].map((own) => `${line(own)}\n`).join("");
}

function showAll(id) { // without a filter, with all columns
  const table = made.get(id), tools = document.getElementById(id).querySelector(".tools");
  if (!table) return;
  tools.querySelector("input").value = "";
  for (const box of tools.querySelectorAll(".columns input")) box.checked = true;
  table.columns().visible(true);
  table.search("").draw();
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // a page that was opened from disk may not be allowed to
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

// Menus close on Escape and on a click elsewhere; headings explain themselves to the mouse and to the keyboard.

addEventListener("click", (event) => {
  for (const menu of document.querySelectorAll(".menu[open]")) if (!menu.contains(event.target)) menu.open = false;
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  explain(null);
  const menu = document.querySelector(".menu[open]");
  if (menu) { menu.open = false; menu.querySelector("summary").focus(); }
});

function prepareHeads(root) {
  for (const head of root.querySelectorAll("th[title]")) {
    head.dataset.about = head.title;
    head.removeAttribute("title"); // or it would show twice
    head.setAttribute("aria-describedby", "page-about");
    if (!has("tables")) head.tabIndex = 0;
  }
}
prepareHeads(document);

function explain(head) {
  const place = document.getElementById("page-about");
  place.hidden = !head;
  if (!head) return;
  place.textContent = head.dataset.about;
  const box = head.getBoundingClientRect();
  place.style.left = `${Math.max(4, Math.min(box.left, innerWidth - place.offsetWidth - 12))}px`;
  place.style.top = `${box.bottom + place.offsetHeight + 4 < innerHeight ? box.bottom + 2 : box.top - place.offsetHeight - 2}px`;
}
for (const kind of ["mouseover", "focusin"]) addEventListener(kind, (event) => explain(event.target.closest?.("th[data-about]") ?? null));
addEventListener("scroll", () => explain(null), true);

// Figures answer on hover and zoom; they are drawn when they come into view, and again in the other theme.

const probe = document.getElementById("page-message");
const style = (name) => { // the colour of this name in the theme
  probe.style.borderColor = `var(${name})`;
  return getComputedStyle(probe).borderTopColor;
};
const isDark = () => document.documentElement.dataset.theme === "dark";
const LEAST_CONTRAST = 3; // of a line with the paper (WCAG 2, 1.4.11)

const onDark = new Map(); // colours that are too dark for dark paper, and what they become: the same hue, lighter
function lighter(colour) {
  if (!/^#[0-9a-f]{6}$/i.test(colour)) return colour;
  if (/^#ffffff$/i.test(colour)) return style("--paper"); // what is empty, and lines between parts
  if (onDark.has(colour)) return onDark.get(colour);
  let parts = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const luminance = (rgb) => rgb.map((part) => ((part / 255 + 0.055) / 1.055) ** 2.4).reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const paper = luminance(style("--paper").match(/\d+/g).map(Number));
  while ((luminance(parts) + 0.05) / (paper + 0.05) < LEAST_CONTRAST) parts = parts.map((part) => part + (255 - part) * 0.08);
  onDark.set(colour, `#${parts.map((part) => Math.round(part).toString(16).padStart(2, "0")).join("")}`);
  return onDark.get(colour);
}

function recoloured(value) {
  if (typeof value === "string") return lighter(value);
  if (Array.isArray(value)) return value.map(recoloured);
  return value && typeof value === "object" ? Object.fromEntries(Object.entries(value).map(([key, part]) => [key, recoloured(part)])) : value;
}

function themed(layout) {
  const axis = { gridcolor: style("--line"), zerolinecolor: style("--line"), linecolor: style("--line"), automargin: true };
  const names = new Set(["xaxis", "yaxis", ...Object.keys(layout).filter((key) => /^[xy]axis/.test(key))]);
  const axes = Object.fromEntries([...names].map((name) => [name, { ...axis, ...layout[name] }]));
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: style("--text"), family: "system-ui, sans-serif", size: 13 },
    colorway: ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442"],
    hoverlabel: { namelength: -1, bgcolor: style("--raised"), bordercolor: style("--line"), font: { color: style("--text") } },
    margin: { t: 30, r: 20, b: 40, l: 50 }, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, modebar: { color: style("--quiet"), activecolor: style("--text") },
    ...layout, ...axes,
  };
}

const config = { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset" };

const heightOf = (place) => Number(place.dataset.height);

const NARROW = 500, CHARACTER = 7, LINE = 24; // of a figure and of words in it, in pixels

function specOf(figure, height, width) {
  if (figure.narrow && width < NARROW) figure = { ...figure, layout: figure.narrow };
  if (isDark()) figure = { ...figure, ...recoloured({ data: figure.data, layout: figure.layout, colours: figure.colours }) };
  return figure.kernels ? figure : { data: figure.data, layout: fitted(figure.data, themed({ height, ...figure.layout }), width) };
}

function fitted(data, layout, width) { // height for what plotly would else take from the plot: a legend of many rows, and names on several lines
  const named = new Set([...data.filter((own) => own.showlegend !== false), ...(layout.shapes ?? []).filter((own) => own.showlegend)].map((own) => own.name).filter(Boolean));
  const entry = Math.max(0, ...[...named].map((name) => name.length)) * CHARACTER + 45, rows = Math.ceil(named.size / Math.max(1, Math.floor((0.65 * width) / entry)));
  let height = layout.height + LINE * Math.max(0, rows - 2);
  const broken = {};
  let right = layout.margin?.r ?? 0; // words beside lying bars may reach beyond the plot
  for (const [key, axis] of Object.entries(layout)) {
    if (/^xaxis/.test(key) && axis.title?.text) broken[key] = { ...axis, title: { ...axis.title, text: inLines(axis.title.text, Math.floor((0.65 * width) / CHARACTER)) } };
    if (!/^yaxis/.test(key) || !axis.ticktext) continue;
    if (width < NARROW) right = 60;
    const ticktext = axis.ticktext.map((text) => inLines(text, Math.max(20, Math.floor((0.3 * width) / CHARACTER))));
    const most = Math.max(...ticktext.map((text) => text.split("<br>").length));
    if (most > 1) broken[key] = { ...axis, ticktext };
    height += ticktext.length * Math.max(0, 16 * most - 32);
  }
  return { ...layout, ...broken, height, margin: { ...layout.margin, r: right }, legend: { ...layout.legend, maxheight: LINE * (rows + 2) } };
}

function inLines(text, room) {
  const lines = [""];
  for (const word of text.split(" ")) {
    if (lines.at(-1) && lines.at(-1).length + word.length >= room) lines.push(word);
    else lines[lines.length - 1] += `${lines.at(-1) && " "}${word}`;
  }
  return lines.join("<br>");
}

async function draw(place) {
  if (!has("plotly")) return;
  const { library, all } = loaded ?? (await drawing());
  const height = heightOf(place), figure = specOf(all[place.dataset.figure], height, place.clientWidth);
  place.style.minHeight = "";
  if (figure.kernels) return drawStep(library, place, figure, place.clientWidth < NARROW ? height + 140 : height); // for the legend
  if (!place.zoom) {
    const drawn = library.newPlot(place, figure.data, figure.layout, config);
    place.zoom = (range) => library.relayout(place, range ? { "xaxis.range": range } : { "xaxis.autorange": true, "yaxis.autorange": true });
    listen(place);
    await drawn;
  } else await library.react(place, figure.data, figure.layout, config);
}

function listen(place) { // zoom by keys, and by the wheel while the figure has the focus, so that the page still scrolls
  const zoomed = (factor, at, move = 0) => {
    const [from, to] = place.range?.() ?? place._fullLayout.xaxis.range.map(Number), width = to - from;
    if (!Number.isFinite(width)) return;
    const start = from + (at * (1 - factor) + move) * width;
    place.zoom([start, start + width * factor]);
  };
  place.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const keys = { "+": [0.5, 0.5], "=": [0.5, 0.5], "-": [2, 0.5], ArrowLeft: [1, 0, -0.25], ArrowRight: [1, 0, 0.25] };
    if (event.key === "0") place.zoom(null);
    else if (keys[event.key]) zoomed(...keys[event.key]);
    else return;
    event.preventDefault();
  });
  place.addEventListener("pointerdown", () => place.focus({ preventScroll: true }));
  place.addEventListener("wheel", (event) => {
    if (document.activeElement !== place) return;
    event.preventDefault();
    const box = place.querySelector(".draglayer .nsewdrag").getBoundingClientRect();
    zoomed(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 250))), Math.max(0, Math.min(1, (event.clientX - box.left) / box.width)));
  }, { passive: false });
}

// One step, kernel by kernel. Only what is in view is drawn, so that the number of kernels does not matter: few kernels as
// bars with their names, many as an image whose columns have the class that ran longest in them. A column is idle if half of it is.

const MOST_BARS = 150, LEAST_NS = 200, MARGIN = 80;
const [rounded, exact] = [3, 6].map((digits) => new Intl.NumberFormat("en", { maximumFractionDigits: digits }));
const ms = (ns) => exact.format(ns / 1e6);
const duration = (ns) => ns < 1e6 ? `${rounded.format(ns / 1e3)}\u00a0µs` : `${ms(ns)}\u00a0ms`;
const plain = (escaped) => new DOMParser().parseFromString(escaped, "text/html").body.textContent; // which runs nothing

function integers([begin, count, width]) { // the lowest bytes of all come first, and the lowest bit of each is its sign
  const found = new Float64Array(count);
  for (let byte = width - 1; byte >= 0; byte--) for (let i = 0; i < count; i++) found[i] = 256 * found[i] + loaded.numbers[begin + byte * count + i];
  return found.map((own) => own % 2 ? -(own + 1) / 2 : own / 2);
}

function unfold(lane) { // times from their differences; `reach` is the latest end so far, to find the first kernel in view
  if (lane.start) return;
  for (const name of ["gap", "length", "name", "place", "launch_us", "unknown"]) lane[name] = integers(lane[name]);
  for (const name of ["start", "end", "reach"]) lane[name] = new Float64Array(lane.name.length);
  for (let i = 0, end = 0; i < lane.name.length; i++) {
    lane.start[i] = end + lane.gap[i];
    lane.end[i] = end = lane.start[i] + lane.length[i];
    lane.reach[i] = Math.max(end, lane.reach[i - 1] ?? end);
  }
  let launch = 0;
  lane.launch = Array.from(lane.launch_us, (more) => (launch += more) * 1e3);
  for (const i of lane.unknown) lane.launch[i] = null;
}

function inView(lane, from, to) {
  let low = 0, high = lane.start.length;
  while (low < high) { const middle = (low + high) >> 1; if (lane.reach[middle] <= from) low = middle + 1; else high = middle; }
  const found = [];
  for (let i = low; i < lane.start.length && lane.start[i] < to; i++) if (lane.end[i] >= from) found.push(i);
  return found;
}

function columns(figure, lane, kernels, from, to, count) { // of each column, the longest kernel of the class that ran longest in it, and how many kernels there are
  const kinds = figure.colours.length + 1, width = (to - from) / count, sum = new Float64Array(count * kinds), longest = new Float64Array(count * kinds), shown = new Int32Array(count * kinds), number = new Int32Array(count);
  for (const i of kernels) {
    const first = Math.max(0, Math.floor((lane.start[i] - from) / width)), last = Math.min(count - 1, Math.floor((lane.end[i] - from) / width)), kind = figure.kind[lane.name[i]];
    for (let column = first; column <= last; column++) {
      const at = column * kinds + kind, part = Math.min(lane.end[i], from + (column + 1) * width) - Math.max(lane.start[i], from + column * width) + 1e-9; // one of no duration shows too
      number[column]++;
      sum[at] += part;
      if (part > longest[at]) { longest[at] = part; shown[at] = i; }
    }
  }
  return Array.from(number, (own, column) => {
    let best = column * kinds;
    for (let at = best; at < (column + 1) * kinds; at++) if (sum[at] > sum[best]) best = at;
    const isIdle = best % kinds === kinds - 1;
    return own && (!isIdle || sum[best] >= width / 2) ? [shown[best], own] : null;
  });
}

function fitting(text, room) { // a text that is escaped is not cut within an entity
  if (text.length <= room) return text;
  return room < 4 ? "" : `${text.slice(0, room - 1).replace(/&[^;]*$/, "")}…`;
}

function about(figure, lane, i) { // what there is to say of one kernel or idle time, in escaped lines
  const name = lane.name[i], launch = lane.launch[i] ?? null;
  return [
    figure.names[name],
    [...new Set([figure.classes[figure.kind[name]], figure.places[lane.place[i]], lane.label])].filter(Boolean).join(", "),
    `${duration(lane.end[i] - lane.start[i])}, from ${ms(lane.start[i])}\u00a0ms${launch === null ? "" : `, launched ${duration(Math.max(0, Math.round((lane.start[i] - launch) / 1e3) * 1e3))} before`}`,
  ];
}

function stepTraces(figure, colours, from, to, pixels) { // and which kernel is in each row and column of the first
  const perMs = pixels * 1e6 / (to - from), clip = (start, end) => [Math.max(start, from) / 1e6, Math.max((Math.min(end, to) - Math.max(start, from)) / 1e6, 1 / perMs)];
  const bars = (rows, extra) => { // a row has its label, start, end, text, hover text and colour; each is at least a pixel wide
    const places = rows.map((row) => clip(row[1], row[2]));
    return {
      type: "bar", orientation: "h", y: rows.map((row) => row[0]), base: places.map((place) => place[0]), x: places.map((place) => place[1]),
      text: rows.map((row, r) => fitting(row[3], Math.floor(places[r][1] * perMs / 8) - 1)), hovertext: rows.map((row) => row[4]), marker: { color: rows.map((row) => row[5]), line: { width: places.map((place) => place[1] * perMs < 4 ? 0 : 1), color: colours.paper } },
      hoverinfo: "text", textposition: "inside", insidetextanchor: "middle", textangle: 0, constraintext: "none", cliponaxis: true, width: 0.85, showlegend: false, ...extra,
    };
  };
  const views = figure.lanes.map((lane) => inView(lane, from, to)), traces = [];
  let shown = figure.lanes.map(() => []);
  if (views.reduce((sum, view) => sum + view.length, 0) <= MOST_BARS) {
    shown = figure.lanes.flatMap((lane, l) => views[l].map((i) => [l, i]));
    traces.push(bars(shown.map(([l, i]) => {
      const lane = figure.lanes[l], name = lane.name[i];
      return [lane.label, lane.start[i], lane.end[i], figure.names[name], about(figure, lane, i).join("<br>"), colours.classes[figure.kind[name]]];
    }), { offset: -0.425 }));
  } else {
    const count = colours.classes.length, width = Math.max(50, Math.round(pixels)), dx = (to - from) / width / 1e6;
    const found = figure.lanes.map((lane, l) => columns(figure, lane, views[l], from, to, width));
    shown = found.map((row, l) => row.map((own) => own && [l, own[0]]));
    traces.push({
      type: "heatmap", z: found.map((row, l) => row.map((own) => own && figure.kind[figure.lanes[l].name[own[0]]])),
      text: found.map((row, l) => row.map((own) => own ? [...about(figure, figure.lanes[l], own[0]), ...(own[1] > 1 ? [`the longest of its class, of ${own[1]} at this place`] : [])].join("<br>") : "")),
      x0: from / 1e6 + dx / 2, dx, y: figure.lanes.map((lane) => lane.label), zmin: -0.5, zmax: count - 0.5, showscale: false, hoverinfo: "text", hoverongaps: false, ygap: 6, xgap: 0, zsmooth: false,
      colorscale: colours.classes.flatMap((colour, i) => [[i / count, colour], [(i + 1) / count, colour]]),
    });
  }
  const spans = figure.rows.flatMap((row) => row.spans.map((span, i) => ({ row, span, i }))).filter(({ span }) => span.end_ns > from && span.start_ns < to);
  if (figure.rows.length) {
    traces.push(bars(spans.map(({ row, span, i }) => [
      row.label, span.start_ns, span.end_ns, span.name, `${span.name}<br>${duration(span.end_ns - span.start_ns)}, from ${ms(span.start_ns)}\u00a0ms`, colours.shades[i % 2],
    ]), { yaxis: "y2", textfont: { color: colours.text }, insidetextfont: { color: colours.text } }));
  }
  for (const [i] of figure.colours.entries()) {
    traces.push({ type: "scatter", mode: "markers", x: [null], y: [figure.lanes[0]?.label], name: figure.classes[i], hoverinfo: "skip", marker: { symbol: "square", size: 11, color: colours.classes[i] } });
  }
  return [traces, shown];
}

function planStep(place, figure, height) { // what does not depend on what is in view
  figure.lanes.forEach(unfold);
  const rows = figure.rows.length, lanes = figure.lanes.map((lane) => lane.label), above = rows ? 1 - (0.5 * rows) / (0.5 * rows + lanes.length + 0.3) : 1;
  const axis = { type: "category", categoryorder: "array", dtick: 1, fixedrange: true, showgrid: false, ticklabeloverflow: "allow" };
  const own = place.own ??= { view: [0, figure.length_ns], shown: [], selected: null, next: null, busy: null };
  own.colours = { classes: [...figure.colours, style("--idle")], shades: [style("--shade-1"), style("--shade-2")], text: style("--text"), paper: style("--paper") };
  own.figure = figure;
  own.layout = themed({
    height, dragmode: "zoom", barmode: "overlay", legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, itemclick: false, itemdoubleclick: false },
    xaxis: { title: { text: "time from the start of the step (ms)" }, anchor: "y", exponentformat: "none", ticklabeloverflow: "allow" }, margin: { t: 10, r: 20, b: 40, l: 60 }, hovermode: "closest",
    yaxis: { ...axis, categoryarray: lanes, range: [lanes.length - 0.5, -0.5], domain: [0, rows ? above - 0.03 : 1] },
    ...(rows ? { yaxis2: { ...axis, categoryarray: figure.rows.map((row) => row.label), range: [rows - 0.5, -0.5], domain: [above, 1] } } : {}),
  });
  return own;
}

function viewOfStep(own, width) {
  const [data, shown] = stepTraces(own.figure, own.colours, ...own.view, width);
  const xaxis = { ...own.layout.xaxis, range: own.view.map((ns) => ns / 1e6), autorange: false };
  return { data, shown, layout: { ...own.layout, xaxis, shapes: marks(own) } };
}

async function drawStep(library, place, figure, height) {
  const own = planStep(place, figure, height);
  own.next ??= own.view;
  if (place.zoom) return place.zoom("same");
  const show = async () => { // the latest wish only, at most one in a frame
    while (own.next) {
      const [from, to] = own.next, width = Math.min(Math.max(to - from, LEAST_NS), own.figure.length_ns), start = Math.max(0, Math.min(from, own.figure.length_ns - width));
      own.view = [start, start + width];
      own.next = null;
      const { data, shown, layout } = viewOfStep(own, place._fullLayout?._size.w ?? place.clientWidth - MARGIN);
      own.shown = shown;
      if (own.width !== place.clientWidth) own.margin = null; // margins are worked out once, since that takes half of a zoom's time
      await library.react(place, data, { ...layout, ...(own.margin ? { margin: own.margin } : {}) }, config);
      const { t, r, b, l } = place._fullLayout._size;
      own.margin ??= { t, r, b, l, autoexpand: false };
      own.width = place.clientWidth;
    }
    own.busy = null;
  };
  await show();
  place.range = () => (own.next ?? own.view).map((ns) => ns / 1e6); // what is wished already, while it is being drawn
  place.zoom = (range) => {
    own.next = range === "same" ? own.next ?? own.view : range ? range.map((value) => value * 1e6) : [0, figure.length_ns];
    return (own.busy ??= new Promise(requestAnimationFrame).then(show));
  };
  listen(place);
  place.on("plotly_relayout", (change) => { // dragging, or a double click
    if (change["xaxis.range[0]"] !== undefined) place.zoom([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
    else if (change["xaxis.autorange"]) place.zoom(null);
    else if (change.autosize) place.zoom("same");
  });
  place.on("plotly_doubleclick", () => place.zoom(null));
  const say = finder(place, own);
  place.on("plotly_click", ({ points: [{ curveNumber, pointNumber }] }) => {
    const found = curveNumber ? null : Array.isArray(pointNumber) ? own.shown[pointNumber[0]]?.[pointNumber[1]] : own.shown[pointNumber];
    if (!found) return;
    own.selected = found;
    say("");
    place.zoom("same");
  });
}

function marks(own) { // a frame around the kernel that was found
  if (!own.selected) return [];
  const [l, i] = own.selected, lane = own.figure.lanes[l];
  return [{ type: "rect", x0: lane.start[i] / 1e6, x1: lane.end[i] / 1e6, y0: l - 0.46, y1: l + 0.46, line: { color: own.colours.text, width: 2 } }];
}

function finder(place, own) { // kernels by a part of their names, or by how long they ran; returns what says the one that is selected
  const make = (tag, fields, ...parts) => { const element = Object.assign(document.createElement(tag), fields); element.append(...parts); return element; };
  const { names, whole, kind, classes, lanes } = own.figure, texts = names.map((name, n) => plain(`${name}\n${whole[n]}\n${classes[kind[n]]}`).toLowerCase());
  const input = make("input", { type: "search", placeholder: "Find a kernel", ariaLabel: "Find kernels by a part of the name or of the class" });
  const [next, longest] = ["Next", "Next longest"].map((text) => make("button", { type: "button" }, text));
  const output = make("p", { className: "note found" });
  output.setAttribute("role", "status");
  const say = (before) => {
    const [l, i] = own.selected, name = lanes[l].name[i], [first, ...more] = about(own.figure, lanes[l], i);
    output.textContent = before + plain([first, ...more, ...(whole[name] ? [whole[name]] : [])].join(" · "));
  };
  const go = (order, forward = true) => {
    const text = input.value.trim().toLowerCase(), idle = classes.length - 1;
    const found = lanes.flatMap((lane, l) => Array.from(lane.name, (name, i) => [name, l, i])).filter(([name]) => text ? texts[name].includes(text) : kind[name] !== idle).map(([, l, i]) => [l, i]);
    if (!found.length) { output.textContent = "No kernel has this text in its name or class."; return; }
    found.sort(([k, i], [l, j]) => order(lanes[k], i) - order(lanes[l], j));
    const at = own.selected ? found.findIndex(([l, i]) => l === own.selected[0] && i === own.selected[1]) : -1;
    const now = forward ? (at + 1) % found.length : (Math.max(at, 0) - 1 + found.length) % found.length;
    own.selected = found[now];
    say(`${now + 1} of ${found.length}: `);
    const [l, i] = own.selected, length = Math.max(lanes[l].end[i] - lanes[l].start[i], LEAST_NS / 5);
    place.zoom([(lanes[l].start[i] - 2 * length) / 1e6, (lanes[l].start[i] + 3 * length) / 1e6]);
  };
  const inTime = (lane, i) => lane.start[i], byLength = (lane, i) => lane.start[i] - lane.end[i];
  next.addEventListener("click", () => go(inTime));
  longest.addEventListener("click", () => go(byLength));
  input.addEventListener("keydown", (event) => { if (event.key === "Enter") go(inTime, !event.shiftKey); });
  place.before(make("div", { className: "tools" }, input, next, longest));
  place.after(output);
  return say;
}

// What is kept of a run is made when the run is opened.

async function fill(run) {
  const place = run.querySelector(":scope > .inside"), inside = (await runs())[run.id];
  if (place.dataset.made) return;
  place.dataset.made = "made";
  place.innerHTML = inside; // escaped when the page was written, as the page is
  prepareHeads(place);
  observe(place);
}
addEventListener("toggle", ({ target }) => { if (target.open && target.matches(".run")) fill(target); }, true);

// Theme, print, and what is made when it comes into view.

async function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.documentElement.classList.toggle("dark", dark);
  const button = document.getElementById("page-theme");
  button.textContent = dark ? "Light" : "Dark";
  button.setAttribute("aria-pressed", String(dark));
  await Promise.all([...document.querySelectorAll(".drawing.js-plotly-plot")].map(draw));
}

const PRINTED = 900; // width of a figure, in pixels, before it is scaled to the paper

function image(place) { // what the figure shows, or would show once drawn
  const { library, all } = loaded, aside = document.createElement("div"), height = heightOf(place), figure = specOf(all[place.dataset.figure], height, PRINTED);
  const { data, layout } = figure.kernels ? viewOfStep(planStep(place, figure, height), PRINTED - MARGIN) : place.zoom ? place : figure;
  document.body.append(aside);
  const plotted = library.newPlot(aside, structuredClone(data), { ...structuredClone(layout), width: PRINTED, autosize: false }, { staticPlot: true });
  const drawn = new DOMParser().parseFromString(library.Snapshot.toSVG(aside, "svg"), "image/svg+xml").documentElement;
  aside.remove();
  plotted.then(() => library.purge(aside));
  drawn.setAttribute("viewBox", `0 0 ${drawn.getAttribute("width")} ${drawn.getAttribute("height")}`);
  for (const name of ["width", "height"]) drawn.removeAttribute(name);
  drawn.setAttribute("class", "printed");
  drawn.setAttribute("aria-label", place.getAttribute("aria-label"));
  return drawn;
}

let restore = null; // what undoes the preparations for print

function prepare() { // whole tables, all sentences, and every figure as an image, in light; at once, as the browser does not wait
  const dark = isDark(), opened = [...document.querySelectorAll(".more:not([open])")];
  setTheme(false);
  for (const id of made.keys()) showAll(id);
  for (const more of opened) more.open = true;
  for (const place of loaded ? document.querySelectorAll(".drawing") : []) if (!place.closest("details:not([open])")) place.before(image(place));
  restore = () => {
    for (const drawn of document.querySelectorAll(".printed")) drawn.remove();
    for (const more of opened) more.open = false;
    setTheme(dark);
    restore = null;
  };
}
addEventListener("beforeprint", () => restore ?? prepare());
addEventListener("afterprint", () => restore?.());

async function printPage() {
  if (has("plotly")) await drawing();
  window.print();
}

document.getElementById("page-theme").addEventListener("click", () => setTheme(!isDark()));
document.getElementById("page-print").addEventListener("click", printPage);
addEventListener("keydown", (event) => {
  if (event.key === "p" && (event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey) { event.preventDefault(); printPage(); }
});
setTheme(matchMedia("(prefers-color-scheme: dark)").matches);

const observing = (make, rootMargin) => new IntersectionObserver((entries, own) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    own.unobserve(target);
    make(target);
  }
}, { rootMargin });
const nearTables = observing(makeTable, "1000px"), nearFigures = observing(draw, "100px");
function observe(root) {
  for (const target of root.querySelectorAll(".block.table")) nearTables.observe(target);
  for (const target of root.querySelectorAll(".drawing")) nearFigures.observe(target);
}
observe(document);

const idle = window.requestIdleCallback ?? setTimeout; // the libraries are there before somebody scrolls to what needs them, tables first
if (has("tables")) idle(tables);
if (has("plotly")) setTimeout(() => idle(drawing), 1500);

function cellOf(name) { // TABLE.ROW.COLUMN, which is an identifier in the page only where a link leads to it
  const parts = name.split("."), [row, column] = parts.splice(-2).map(Number), owner = parts.join("."), block = document.getElementById(owner);
  if (!block?.matches(".block.table")) return null;
  return made.get(owner)?.cell(row, column).node() ?? block.querySelector("table").tBodies[0].rows[row]?.cells[column];
}

async function follow() { // a link to a cell marks it, a link to a run opens it
  for (const cell of document.querySelectorAll(".marked")) cell.classList.remove("marked");
  let name = "";
  try { name = decodeURIComponent(location.hash.slice(1)); } catch { return; }
  if (!name) return;
  const owner = name.split(".").slice(0, -2).join(".");
  if (!document.getElementById(name) && made.has(owner)) showAll(owner); // a filter or a hidden column took it away
  const run = [...document.querySelectorAll(".run")].find(({ id }) => /^[-.]/.test(name.startsWith(id) ? name.slice(id.length) : ""));
  if (run && !document.getElementById(name)) await fill(run); // the link leads into it
  const target = document.getElementById(name) ?? cellOf(name);
  if (!target) return;
  for (let box = target.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
  if (!target.matches("td")) return target.scrollIntoView();
  target.classList.add("marked");
  target.tabIndex = -1;
  target.focus({ preventScroll: true });
  target.scrollIntoView({ block: "center", inline: "center" });
}
addEventListener("hashchange", follow);
addEventListener("click", (event) => { // the same link again
  const link = event.target.closest?.('a[href^="#"]');
  if (link && link.hash === location.hash) follow();
});
follow();
