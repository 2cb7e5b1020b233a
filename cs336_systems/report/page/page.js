"use strict";
// Everything that a reader can do with the page. Texts and data come from the page itself; nothing is requested from outside.

const nonce = document.currentScript.nonce;

async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (char) => char.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

async function load(id) { // a library that the page carries with it, as a module or as a script
  const url = URL.createObjectURL(new Blob([await unpack(id)], { type: "text/javascript" }));
  try { return await import(url); } finally { URL.revokeObjectURL(url); }
}

const once = (make) => { let made; return () => (made ??= make()); };
const data = once(async () => JSON.parse(await unpack("data")));
const tables = once(() => document.getElementById("tables") ? load("tables") : null);
const plotly = once(async () => { if (!document.getElementById("plotly")) return null; await load("plotly"); return window.Plotly; });

function say(text) {
  const place = document.getElementById("message");
  place.textContent = text;
  place.classList.add("shown");
  clearTimeout(say.timer);
  say.timer = setTimeout(() => place.classList.remove("shown"), 2500);
}

// Tables sort, filter, hide columns and are copied.

async function makeTable(block) {
  const library = await tables();
  if (!library) return;
  const element = block.querySelector("table");
  const table = new library.default(element, {
    paging: element.tBodies[0].rows.length > 60, pageLength: 50, info: false, order: [], autoWidth: false,
    layout: { topStart: null, topEnd: null, bottomStart: null, bottomEnd: element.tBodies[0].rows.length > 60 ? "paging" : null },
  });
  const tools = block.querySelector(".tools");
  tools.hidden = false;
  tools.querySelector("input").addEventListener("input", (event) => table.search(event.target.value).draw());
  const [columns] = tools.querySelectorAll(".choices");
  table.columns().every(function () {
    const label = document.createElement("label"), box = document.createElement("input");
    Object.assign(box, { type: "checkbox", checked: true });
    box.addEventListener("change", () => this.visible(box.checked));
    label.append(box, ` ${this.header().textContent}`);
    columns.append(label);
  });
  for (const button of tools.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => {
      await copy((await data()).copies[block.id][button.dataset.copy]);
      button.closest("details").open = false;
      say(`Copied as ${button.dataset.copy}.`);
    });
  }
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page that was opened from disk may not be allowed to
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

// Pictures answer on hover and zoom; they are drawn when they come into view, and again in the other theme.

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function themed(layout) {
  const axis = { gridcolor: style("--line"), zerolinecolor: style("--line"), linecolor: style("--line"), automargin: true };
  const axes = Object.fromEntries(Object.entries(layout).filter(([key]) => /^[xy]axis/.test(key)).map(([key, own]) => [key, { ...axis, ...own }]));
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: style("--text"), family: "inherit", size: 13 },
    hoverlabel: { font: { family: "inherit" } }, margin: { t: 30, r: 20 }, ...layout, xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis }, ...axes,
  };
}

const config = { responsive: true, displaylogo: false, scrollZoom: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };

async function draw(place) {
  const library = await plotly();
  if (!library) return;
  const figure = (await data()).figures[place.dataset.figure];
  if (!figure) return;
  place.querySelector("img")?.remove();
  if (figure.kernels) return drawStep(library, place, figure);
  await library.newPlot(place, figure.data, themed(figure.layout), config);
}

// One step, kernel by kernel: a row for each lane, redrawn for what is in view, so that the number of kernels does not matter.

const COLUMNS = 1200;

function inView(lane, from, to) {
  const classes = new Array(COLUMNS).fill(null), names = new Array(COLUMNS).fill(""), longest = new Float64Array(COLUMNS);
  const { start, end, kind, name } = lane, width = (to - from) / COLUMNS;
  let low = 0, high = start.length;
  while (low < high) { const middle = (low + high) >> 1; if (end[middle] < from) low = middle + 1; else high = middle; }
  for (let i = low; i < start.length && start[i] < to; i++) {
    const first = Math.max(0, Math.floor((start[i] - from) / width)), last = Math.min(COLUMNS - 1, Math.floor((end[i] - from) / width));
    for (let column = first; column <= last; column++) {
      const part = Math.min(end[i], from + (column + 1) * width) - Math.max(start[i], from + column * width);
      if (part >= longest[column]) { longest[column] = part; classes[column] = kind[i]; names[column] = i; }
    }
  }
  return { classes, names };
}

function stepTraces(figure, from, to) {
  const z = [], text = [];
  for (const lane of figure.lanes) {
    const { classes, names } = inView(lane, from, to);
    z.push(classes);
    text.push(names.map((i) => i === "" ? "" : `${figure.names[lane.name[i]]}<br>${figure.classes[lane.kind[i]]}<br>${((lane.end[i] - lane.start[i]) / 1e3).toLocaleString()} µs, from ${(lane.start[i] / 1e6).toFixed(3)} ms`));
  }
  const dx = (to - from) / COLUMNS / 1e6, count = figure.classes.length;
  const colours = figure.colours.flatMap((colour, i) => [[i / count, colour], [(i + 1) / count, colour]]);
  return [{
    type: "heatmap", z, text, x0: from / 1e6 + dx / 2, dx, y: figure.lanes.map((lane) => lane.label), zmin: -0.5, zmax: count - 0.5, colorscale: colours, showscale: false,
    hoverinfo: "text+y", hoverongaps: false, ygap: 6, xgap: 0, zsmooth: false,
  }];
}

async function drawStep(library, place, figure) {
  const whole = [0, figure.length_ns];
  const layout = themed({ ...figure.layout, xaxis: { title: { text: "time (ms)" }, range: whole.map((ns) => ns / 1e6) }, yaxis: { autorange: "reversed", fixedrange: true } });
  await library.newPlot(place, stepTraces(figure, ...whole), layout, { ...config, scrollZoom: true });
  place.on("plotly_relayout", async (change) => {
    if (place.redrawing || !Object.keys(change).some((key) => key.startsWith("xaxis"))) return;
    place.redrawing = true;
    const [from, to] = change["xaxis.autorange"] ? whole : place.layout.xaxis.range.map((ms) => ms * 1e6);
    layout.xaxis.range = [from / 1e6, to / 1e6];
    layout.xaxis.autorange = false;
    await library.react(place, stepTraces(figure, Math.max(0, from), Math.min(whole[1], to)), layout, { ...config, scrollZoom: true });
    place.redrawing = false;
  });
}

// Theme, print, and what is made when it comes into view.

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.documentElement.classList.toggle("dark", dark);
  const button = document.getElementById("theme");
  button.textContent = dark ? "Light" : "Dark";
  button.setAttribute("aria-pressed", String(dark));
  for (const place of document.querySelectorAll(".drawing.js-plotly-plot")) draw(place);
}

document.getElementById("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
document.getElementById("print").addEventListener("click", () => window.print());
setTheme(matchMedia("(prefers-color-scheme: dark)").matches);

const observer = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    observer.unobserve(target);
    (target.matches(".drawing") ? draw : makeTable)(target);
  }
}, { rootMargin: "400px" });
for (const target of document.querySelectorAll(".block.table, .drawing")) observer.observe(target);

function follow() { // a link to a cell marks it
  document.querySelector(".marked")?.classList.remove("marked");
  const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  if (target.matches("td")) target.classList.add("marked");
  target.closest("details")?.setAttribute("open", "");
  target.scrollIntoView({ block: "center", inline: "center" });
}
addEventListener("hashchange", follow);
follow();
