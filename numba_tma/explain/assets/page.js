"use strict";
const data = JSON.parse(document.getElementById("links").textContent);
const inspector = document.getElementById("inspector");
const [MNEMONIC, KIND, MEANING] = [0, 1, 2];
const NONE = Object.freeze({ strong: [], weak: [] });

// The columns: `lines` are their list items; `line` is the one that the keyboard is at.
const panes = [...document.querySelectorAll(".pane")].map((element) => {
  const list = element.querySelector(".code");
  const kind = ["python", "ptx", "sass"].find((name) => element.classList.contains(name));
  return {
    element, list, kind, line: -1, marked: [], side: Number(element.dataset.side), lines: [...list.children],
    scroll: element.querySelector(".scroll"), rail: element.querySelector(".rail"),
    runs: element.querySelector(".runs"), name: `${kind}${element.dataset.side}`,
  };
});
const python = panes[0];
const paneOf = (kind, side) => panes.find((pane) => pane.kind === kind && pane.side === side);
for (const pane of panes) {
  pane.lines.forEach((line, index) => {
    line.id = `${pane.name}-${index}`;
    line.role = "option";
  });
  pane.element.classList.toggle("short", pane.kind === "ptx");
}

// ------------------------------------------------------------------------------------------------ links

const isLine = (pane, index) => index >= 0 && index < pane.lines.length && pane.lines[index].textContent !== "";
const isShown = (pane, index) => pane.lines[index].offsetParent !== null;
const chainOf = (side, index) => data.chains[data.sides[side].chain[index]];

// Lines of SASS by the line of PTX that they came from, and lines of PTX by the Python row that they came from.
const machine = data.sides.map((side) => grouped(side.sass.map((origin) => (origin < 0 ? [] : [origin]))));
const reached = data.sides.map((side, number) => grouped(side.chain.map((chain, index) =>
  side.word[index] < 0 && !machine[number].has(index) ? [] : data.chains[chain])));

function grouped(keysOfLines) {
  const lines = new Map();
  keysOfLines.forEach((keys, index) => {
    for (const key of keys) lines.has(key) ? lines.get(key).push(index) : lines.set(key, [index]);
  });
  return lines;
}

// The whole text of an inlined function of ptx/, where one of its lines or its heading is meant.
function inlinedLines(side, index) {
  const { inlined, word } = data.sides[side];
  if (inlined[index] < 0 || word[index] >= 0) return [index];
  return [...inlined.keys()].filter((other) => inlined[other] === inlined[index]);
}

function sassOf(side, lines) {
  return lines.flatMap((line) => machine[side].get(line) ?? []);
}

// What a line is linked with: for each column the lines to mark, strongly or weakly.
function linked(pane, index) {
  const result = new Map(panes.map((other) => [other, NONE]));
  const set = (other, strong, weak = []) => other && result.set(other, { strong, weak });
  if (pane.kind === "python") {
    const inner = new Set();
    data.sides.forEach((_, side) => {
      const lines = reached[side].get(index) ?? [];
      for (const line of lines) {
        const chain = chainOf(side, line);
        chain.slice(0, chain.indexOf(index)).forEach((row) => inner.add(row));
      }
      set(paneOf("ptx", side), lines, headings(side, lines));
      set(paneOf("sass", side), sassOf(side, lines));
    });
    set(python, [index], [...inner]);
    return result;
  }
  const side = pane.side;
  const origin = pane.kind === "ptx" ? index : data.sides[side].sass[index];
  if (origin < 0) {
    set(pane, [index]);
    return result;
  }
  const lines = pane.kind === "ptx" ? inlinedLines(side, origin) : [origin];
  const [first, ...calls] = chainOf(side, origin);
  set(python, first === undefined ? [] : [first], calls);
  set(paneOf("ptx", side), lines, headings(side, lines));
  const sass = sassOf(side, lines);
  set(paneOf("sass", side), pane.kind === "ptx" ? sass : [index], pane.kind === "ptx" ? [] : sass);
  return result;
}

// The headings of the inlined functions that these lines are in.
function headings(side, lines) {
  const { inlined, word } = data.sides[side];
  const wanted = new Set(lines.map((line) => inlined[line]).filter((number) => number >= 0));
  const found = [];
  inlined.forEach((number, index) => {
    if (wanted.has(number) && word[index] < 0 && inlined[index - 1] !== number) found.push(index);
  });
  return found;
}

function ofKind(kind) {
  const result = new Map([[python, NONE]]);
  const rows = new Set();
  data.sides.forEach((side, number) => {
    const is = (word) => word >= 0 && data.words[word][KIND] === kind;
    const lines = [...side.word.keys()].filter((index) => is(side.word[index]));
    const sass = [...side.sassWord.keys()].filter((index) => is(side.sassWord[index]));
    lines.forEach((line) => chainOf(number, line).slice(0, 1).forEach((row) => rows.add(row)));
    result.set(paneOf("ptx", number), { strong: lines, weak: headings(number, lines) });
    result.set(paneOf("sass", number), { strong: sass, weak: [] });
  });
  result.set(python, { strong: [...rows], weak: [] });
  return result;
}

// ------------------------------------------------------------------------------------------------ marks

let pinned = false;
let shownKind = null;

function mark(marks, scroll, from = null) {
  for (const pane of panes) {
    const { strong, weak } = marks.get(pane) ?? NONE;
    for (const line of pane.marked) line.classList.remove("mark", "weak");
    pane.marked = [...weak, ...strong].map((index) => pane.lines[index]);
    weak.forEach((index) => pane.lines[index].classList.add("weak"));
    strong.forEach((index) => pane.lines[index].classList.replace("weak", "mark") || pane.lines[index].classList.add("mark"));
    pane.strong = [...strong].sort((a, b) => a - b).filter((index) => isShown(pane, index));
    drawRail(pane);
    countRuns(pane);
    if (scroll && pane !== from && strong.length + weak.length) reveal(pane, pane.strong[0] ?? Math.min(...strong, ...weak));
  }
}

// Ticks beside the scroll bar: where in the column something is marked.
function drawRail(pane) {
  const height = pane.list.scrollHeight;
  pane.rail.replaceChildren(...pane.strong.slice(0, 400).map((index) => {
    const { offsetTop, offsetHeight } = pane.lines[index];
    const tick = document.createElement("i");
    tick.style.top = `${(100 * (offsetTop - pane.list.offsetTop)) / height}%`;
    tick.style.height = `max(2px, ${(100 * offsetHeight) / height}%)`;
    return tick;
  }));
}

// Neighbouring marked lines are one run; the heads of the columns count them and step through them.
function runsOf(pane) {
  return pane.strong.filter((index, place) => {
    let before = index - 1;
    while (before >= 0 && !isShown(pane, before)) before--;
    return place === 0 || pane.strong[place - 1] < before;
  });
}

function countRuns(pane) {
  const runs = runsOf(pane);
  pane.run = 0;
  pane.runs.hidden = runs.length < 2;
  pane.runs.querySelector("output").textContent = `1 of ${runs.length}`;
}

function step(pane, by) {
  const runs = runsOf(pane);
  if (!runs.length) return;
  pane.run = (pane.run + by + runs.length) % runs.length;
  pane.runs.querySelector("output").textContent = `${pane.run + 1} of ${runs.length}`;
  reveal(pane, runs[pane.run], true);
}

function reveal(pane, index, always = false) {
  const line = pane.lines[index];
  const { scrollTop, clientHeight } = pane.scroll;
  const top = line.offsetTop - pane.list.offsetTop;
  if (always || top < scrollTop || top + line.offsetHeight > scrollTop + clientHeight) {
    pane.scroll.scrollTop = Math.max(0, top - clientHeight * 0.3);
  }
}

function select(pane, index, { scroll = false } = {}) {
  showKind(null);
  mark(linked(pane, index), scroll, pane);
  describe(pane, index);
}

function clear() {
  pinned = false;
  showKind(null);
  for (const pane of panes) activate(pane, -1);
  mark(new Map(), false);
  introduce();
}

function activate(pane, index) {
  pane.lines[pane.line]?.classList.remove("active");
  pane.lines[pane.line]?.removeAttribute("aria-selected");
  pane.line = index;
  if (index < 0) return pane.list.removeAttribute("aria-activedescendant");
  pane.lines[index].classList.add("active");
  pane.lines[index].ariaSelected = "true";
  pane.list.setAttribute("aria-activedescendant", pane.lines[index].id);
}

function pin(pane, index) {
  pinned = true;
  for (const other of panes) if (other !== pane) activate(other, -1);
  activate(pane, index);
  select(pane, index, { scroll: true });
}

function showKind(kind) {
  shownKind = kind;
  for (const button of document.querySelectorAll("[data-kind]")) button.ariaPressed = String(button.dataset.kind === kind);
}

// ------------------------------------------------------------------------------------------------ words

function element(name, text, className) {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

const plural = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;

function rowName(row) {
  const file = data.files.findLast(([first]) => first <= row)[1];
  const { n, m } = python.lines[row].dataset;
  return `${file.split("/").pop()}:${m || n}`;
}

function cameFrom(side, index) {
  const chain = chainOf(side, index);
  if (!chain.length) return "belongs to no Python line";
  const names = chain.map(rowName).join(", inlined at ");
  return data.sides[side].guessed.includes(index)
    ? `the compiler names no Python line for it; its result is used at ${names}` : `from ${names}`;
}

function introduce() {
  const text = element("p", "", "from");
  text.innerHTML = "Point at a line to see what it became, or what it came from. A click keeps it. With the keyboard: " +
    "<kbd>Tab</kbd> to a column, <kbd>↑</kbd> <kbd>↓</kbd> from line to line, <kbd>←</kbd> <kbd>→</kbd> to what it is linked " +
    "with, <kbd>n</kbd> <kbd>p</kbd> to the next and previous marked lines, <kbd>Enter</kbd> to keep, <kbd>Esc</kbd> to let go.";
  inspector.replaceChildren(text);
}

function describe(pane, index) {
  const parts = pane.kind === "python" ? aboutPython(index) : pane.kind === "ptx" ? aboutPtx(pane.side, index) : aboutSass(pane.side, index);
  const facts = element("div", "");
  facts.append(...parts.filter((part) => part.className !== "doc"));
  inspector.replaceChildren(facts, ...parts.filter((part) => part.className === "doc"));
  for (const part of inspector.children) part.scrollTop = 0;
}

function aboutPython(row) {
  const line = python.lines[row];
  const title = element("h3", line.classList.contains("opening") ? line.querySelector("b").textContent : line.textContent.trim());
  if (line.classList.contains("opening")) return [title];
  const parts = [title, element("span", rowName(row), "kind")];
  data.sides.forEach((side, number) => {
    const lines = reached[number].get(row) ?? [];
    const sass = sassOf(number, lines);
    const of = data.sides.length > 1 ? `${paneOf("ptx", number).list.ariaLabel.replace("PTX of ", "")}: ` : "";
    if (!lines.length) return;
    const counts = new Map();
    for (const index of sass) {
      const kind = data.words[side.sassWord[index]][KIND];
      counts.set(kind, (counts.get(kind) ?? 0) + 1);
    }
    const kinds = [...counts].sort((a, b) => b[1] - a[1]).map(([kind, count]) => `${kind} ${count}`).join(", ");
    const ptx = lines.filter((index) => side.word[index] >= 0).length;
    const text = `${plural(ptx, "instruction")} of PTX, ${plural(sass.length, "instruction")} of SASS`;
    parts.push(element("p", `${of}${text}${kinds && `: ${kinds}`}`));
  });
  if (parts.length === 2) parts.push(element("p", "No instruction: worked out while compiling, or not needed."));
  return parts;
}

function aboutPtx(side, index) {
  const { word, inlined, names } = data.sides[side];
  const line = paneOf("ptx", side).lines[index];
  const parts = [];
  const doc = inlined[index] >= 0 ? data.docs[names[inlined[index]]] : undefined;
  if (word[index] >= 0) {
    const [mnemonic, kind, meaning] = data.words[word[index]];
    parts.push(element("h3", mnemonic), element("span", kind, "kind"));
    if (meaning && !(doc && !line.classList.contains("move"))) parts.push(element("p", meaning));
    const sass = machine[side].get(index) ?? [];
    parts.push(element("p", `${cameFrom(side, index)}; ${sass.length ? `became ${plural(sass.length, "instruction")} of SASS` : "no SASS of its own"}`, "from"));
  } else if (!doc) {
    parts.push(element("h3", line.textContent.trim()));
    if (chainOf(side, index).length) parts.push(element("p", cameFrom(side, index), "from"));
  }
  if (doc) parts.push(about(doc));
  return parts;
}

// A function of ptx/: what it is called in Python, and what its file says of it.
function about([name, text]) {
  const made = element("div", "", "doc");
  made.append(element("h3", name), element("pre", text));
  return made;
}

function aboutSass(side, index) {
  const { sassWord, sass, names, inlined, ordered } = data.sides[side];
  if (sassWord[index] < 0) return [element("h3", paneOf("sass", side).lines[index].textContent), element("p", "A place that branches lead to.")];
  const [mnemonic, kind, meaning] = data.words[sassWord[index]];
  const parts = [element("h3", mnemonic), element("span", kind, "kind")];
  if (meaning) parts.push(element("p", meaning));
  const origin = sass[index];
  if (origin >= 0) {
    const line = paneOf("ptx", side).lines[origin];
    const called = inlined[origin] >= 0 ? names[inlined[origin]] : "";
    const name = called ? ` (ptx.${called})` : "";
    parts.push(element("p", `PTX line ${line.dataset.n}${name}: ${line.textContent}`, "from"));
    if (ordered.includes(index)) parts.push(element("p", "The assembler names no line for it; it is placed by its order after the wgmma.fence.", "from"));
    if (chainOf(side, origin).length) parts.push(element("p", cameFrom(side, origin), "from"));
    if (called) parts.push(about(data.docs[called]));
  }
  return parts;
}

// ------------------------------------------------------------------------------------------------ hands

for (const pane of panes) {
  const indexOf = (event) => pane.lines.indexOf(event.target.closest("li"));
  pane.list.addEventListener("pointermove", (event) => {
    const index = indexOf(event);
    if (pinned || shownKind || !isLine(pane, index) || pane.hovered === index) return;
    pane.hovered = index;
    select(pane, index);
  });
  pane.list.addEventListener("pointerleave", () => {
    pane.hovered = -1;
    if (!pinned && !shownKind) clear();
  });
  pane.list.addEventListener("click", (event) => {
    const index = indexOf(event);
    if (!isLine(pane, index) || String(getSelection())) return;
    if (pinned && pane.line === index) clear();
    else pin(pane, index);
  });
  pane.list.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (key(pane, event.key)) event.preventDefault();
  });
  pane.runs.querySelector(".previous").addEventListener("click", () => step(pane, -1));
  pane.runs.querySelector(".next").addEventListener("click", () => step(pane, 1));
  pane.element.querySelector("button.brief")?.addEventListener("click", (event) => {
    event.target.ariaPressed = String(!pane.element.classList.toggle("short"));
    for (const other of panes) drawRail(other);
  });
}

function move(pane, by, from = pane.line) {
  let index = from;
  for (let next = index + Math.sign(by); by && next >= 0 && next < pane.lines.length; next += Math.sign(by)) {
    if (!isLine(pane, next) || !isShown(pane, next)) continue;
    index = next;
    by -= Math.sign(by);
  }
  if (index < 0) return;
  pin(pane, index);
  reveal(pane, index);
}

// To the column beside this one that has something marked.
function follow(pane, by) {
  for (let place = panes.indexOf(pane) + by; place >= 0 && place < panes.length; place += by) {
    const other = panes[place];
    const index = other.strong?.[0];
    if (index === undefined) continue;
    other.list.focus();
    pin(other, index);
    reveal(other, index);
    return;
  }
}

function key(pane, name) {
  const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20 };
  if (name in moves) move(pane, moves[name]);
  else if (name === "Home") move(pane, 1, -1);
  else if (name === "End") move(pane, -1, pane.lines.length);
  else if (name === "ArrowRight") follow(pane, 1);
  else if (name === "ArrowLeft") follow(pane, -1);
  else if (name === "Enter" || name === " ") move(pane, pane.line < 0 ? 1 : 0);
  else if (name === "n") step(pane, 1);
  else if (name === "p") step(pane, -1);
  else if (name === "Escape") clear();
  else return false;
  return true;
}

for (const button of document.querySelectorAll("[data-kind]")) {
  button.addEventListener("click", () => {
    const kind = button.dataset.kind;
    const again = shownKind === kind;
    clear();
    if (again) return;
    showKind(kind);
    mark(ofKind(kind), true);
    inspector.replaceChildren(element("h3", kind), element("p", "Marked wherever it occurs. Counts are of instructions as they stand in the text, not as they are executed.", "from"));
  });
}
addEventListener("keydown", (event) => event.key === "Escape" && clear());
addEventListener("resize", () => panes.forEach(drawRail));

// The page can be opened at a line of the kernel: page.html#L341
const wanted = /^#L(\d+)$/.exec(location.hash);
clear();
if (wanted) {
  const row = python.lines.findIndex((line) => line.dataset.n === wanted[1] || line.dataset.m === wanted[1]);
  if (row >= 0) {
    pin(python, row);
    reveal(python, row);
  }
}
