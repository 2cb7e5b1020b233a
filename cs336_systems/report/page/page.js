"use strict";
// Everything that a reader can do with the page. Texts and data come from the page itself; nothing is requested from outside.

async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(`packed-${id}`).textContent), (char) => char.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

async function load(id) { // a library that the page carries with it
  const url = URL.createObjectURL(new Blob([await unpack(id)], { type: "text/javascript" }));
  try { return await import(url); } finally { URL.revokeObjectURL(url); }
}

const once = (make) => { let made; return () => (made ??= make()); };
const hasTables = document.getElementById("packed-tables") !== null;
const isSorted = (block) => hasTables && block.querySelector("tbody").rows.length > 1;

// Tables of several rows sort, and long ones filter; one that is wider than its box shows so.

const known = (text) => text !== "" && text !== null && text !== undefined;
const byValue = (sign) => (a, b) => known(a) && known(b) ? sign * (a - b) : known(b) - known(a); // what is not known comes last
const words = new Intl.Collator("en", { numeric: true });

const tables = once(async () => {
  const library = (await load("tables")).default;
  library.type("value", "order", { asc: byValue(1), desc: byValue(-1) });
  library.type("words", "order", { asc: words.compare, desc: (a, b) => words.compare(b, a) });
  return library;
});

const leastFiltered = 8; // rows: a reader sees fewer at once

async function makeTable(block) {
  const library = await tables(), element = block.querySelector("table"), heads = [...element.tHead.rows[0].cells];
  const table = new library(element, {
    paging: false, info: false, order: [], autoWidth: false, orderMulti: true,
    layout: { topStart: null, topEnd: null, bottomStart: null, bottomEnd: null },
    columnDefs: heads.map((head, i) => ({ targets: i, type: head.classList.contains("number") ? "value" : "words" })),
    language: { zeroRecords: "No row has this text.", emptyTable: "There are no rows." },
  });
  if (table.rows().count() < leastFiltered) return;
  const filter = Object.assign(document.createElement("input"), { type: "search", placeholder: "Filter rows" });
  filter.ariaLabel = `Filter the rows of: ${block.querySelector("h3").textContent}`;
  filter.addEventListener("input", () => table.search(filter.value).draw());
  block.querySelector(".head").append(filter);
}

// Headings explain themselves to the mouse and to the keyboard.

addEventListener("keydown", (event) => { if (event.key === "Escape") explain(null); });

for (const head of document.querySelectorAll("th[title]")) {
  head.dataset.about = head.title;
  head.removeAttribute("title"); // or it would show twice
  head.setAttribute("aria-describedby", "page-about");
  if (!isSorted(head.closest(".block"))) head.tabIndex = 0;
}

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

// A kernel of a table leads to its launches in the timeline.

addEventListener("click", (event) => {
  const kernel = event.target.closest?.("a[data-places]"), picture = kernel && document.querySelector(`${kernel.hash} .drawing`);
  if (!picture) return;
  const [left, right, top, bottom] = picture.firstElementChild.dataset.lanes.split(" "), marks = document.createElement("div");
  marks.className = "marks";
  Object.assign(marks.style, { inset: `${top}% ${100 - right}% ${100 - bottom}% ${left}%` });
  for (const place of kernel.dataset.places.split(" ")) {
    const mark = marks.appendChild(document.createElement("i"));
    Object.assign(mark.style, { left: `${place / 10}%`, width: "0.15%" });
  }
  const name = Object.assign(document.createElement("p"), { className: "note", textContent: `Marked: ${kernel.title || kernel.textContent}` });
  for (const old of picture.parentElement.querySelectorAll(".marks, .note")) old.remove();
  picture.append(marks);
  picture.after(name);
});

// The theme, and tables that come into view.

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  const button = document.getElementById("page-theme");
  button.hidden = false;
  button.textContent = dark ? "Light" : "Dark";
  button.setAttribute("aria-pressed", String(dark));
}
setTheme(matchMedia("(prefers-color-scheme: dark)").matches);
document.getElementById("page-theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));

const near = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) if (isIntersecting) { near.unobserve(target); makeTable(target); }
}, { rootMargin: "1000px" });
for (const block of document.querySelectorAll(".block.table")) if (isSorted(block)) near.observe(block);

const fit = (box) => box.classList.toggle("cut", box.scrollLeft + box.clientWidth < box.scrollWidth - 2);
const resized = new ResizeObserver((entries) => { for (const { target } of entries) fit(target.closest(".scroll")); });
for (const box of document.querySelectorAll(".scroll")) {
  resized.observe(box);
  resized.observe(box.firstElementChild);
  box.addEventListener("scroll", () => fit(box));
}
