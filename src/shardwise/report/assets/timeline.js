// The step's timeline per rank, on a canvas: thousands of activities stay quick to move and zoom.
const GUTTER = 64, AXIS = 24, LANE = [18, 9, 9], SPACE = 3, BETWEEN = 12;
const canvas = find("#canvas");
const view = { step: null, from: 0, to: 1, rank: 0, at: -1, hover: null, colours: {}, sought: "" };

function showStep(i) {
  const step = DATA.steps[i];
  view.step = step;
  view.rows = rowsOf(step);
  Object.assign(view, { from: 0, to: step.ticks, rank: 0, at: -1, hover: null });
  find("#step-note").textContent = `A ${step.label} step of ${time(step.seconds)}; ${percent(step.overlap)} of the communication is hidden behind computation.`
    + (step.shown < step.world ? ` The first ${step.shown} of ${step.world} ranks are shown.` : "");
  const words = { transfer: "transfer of activations", statistics: "sums of statistics", gradients: "sums of gradients" };
  legend(find("#kinds"), [...step.kinds.map((kind) => [words[kind] || kind, `var(--${kind}, var(--copy))`]), ["waiting", "waits"]]);
  for (const button of find("#steps").children) button.setAttribute("aria-pressed", String(button.dataset.step === String(i)));
  canvas.setAttribute("aria-label", `Timeline of ${step.shown} ranks over ${time(step.seconds)}`);
  find("#activity").textContent = "";
  ranksTable(step);
  seek();
}

// One row per rank and lane that has anything to show, with its activities in order.
function rowsOf(step) {
  const used = step.lanes.map((_, lane) => lane === 0 || step.spans.some((span) => span[2] === lane));
  const rows = [];
  let y = AXIS;
  for (let rank = 0; rank < step.shown; rank++) {
    step.lanes.forEach((name, lane) => {
      if (!used[lane]) return;
      const spans = step.spans.filter((span) => span[2] === lane).map(([label, kind, , starts, lengths]) => {
        const start = Array.isArray(starts) ? starts[rank] : starts, length = Array.isArray(lengths) ? lengths[rank] : lengths;
        return { name: step.names[label], kind: step.kinds[kind], start, end: start + length, rank, lane: name };
      }).filter((span) => span.end > span.start).sort((a, b) => a.start - b.start);
      rows.push({ rank, lane, name, y, height: LANE[lane], spans });
      y += LANE[lane] + SPACE;
    });
    y += BETWEEN - SPACE;
  }
  view.height = y;
  return rows;
}

function readColours() {
  const style = getComputedStyle(canvas);
  const probe = make("i", {});
  canvas.parentElement.append(probe);
  const read = (name) => { probe.style.color = `var(--${name}, var(--copy))`; return getComputedStyle(probe).color; };
  view.colours = Object.fromEntries([...view.step.kinds, "ink", "quiet", "line", "card", "sunk", "accent"].map((name) => [name, read(name)]));
  view.font = style.fontFamily;
  probe.remove();
}

const toX = (tick) => GUTTER + (tick - view.from) / (view.to - view.from) * (view.width - GUTTER - 8);
const toTick = (x) => view.from + (x - GUTTER) / (view.width - GUTTER - 8) * (view.to - view.from);

function paint() {
  readColours();
  const dense = devicePixelRatio || 1;
  view.width = canvas.parentElement.clientWidth;
  canvas.width = view.width * dense;
  canvas.height = view.height * dense;
  canvas.style.height = `${view.height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(dense, dense);
  pen.font = `11px ${view.font}`;
  pen.textBaseline = "middle";
  paintAxis(pen);
  for (const row of view.rows) paintRow(pen, row);
}

function paintAxis(pen) {
  const seconds = view.step.seconds / view.step.ticks;
  const low = 1e3 * view.from * seconds, high = 1e3 * view.to * seconds;
  const marks = ticks(low, high, Math.max(2, view.width / 110));
  pen.textAlign = "center";
  for (const mark of marks) {
    const x = toX(mark / 1e3 / seconds);
    pen.fillStyle = view.colours.line;
    pen.fillRect(x, AXIS - 6, 1, view.height);
    pen.fillStyle = view.colours.quiet;
    if (x > GUTTER + 16 || mark === 0) pen.fillText(`${Number(mark.toPrecision(6))}${mark === marks[marks.length - 1] ? " ms" : ""}`, Math.min(x, view.width - 28), 9);
  }
}

function paintRow(pen, row) {
  pen.fillStyle = view.colours.quiet;
  pen.textAlign = "left";
  if (row.lane === 0) pen.fillText(`rank ${row.rank}`, 10, row.y + row.height / 2);
  if (row.lane === 0) { // what stays visible of this between the activities is waiting
    pen.fillStyle = view.colours.line;
    pen.globalAlpha = 0.45;
    pen.fillRect(GUTTER, row.y, view.width - GUTTER - 8, row.height);
    pen.globalAlpha = 1;
  }
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, row.y - 2, view.width - GUTTER - 8, row.height + 4);
  pen.clip();
  for (const span of row.spans) {
    if (span.end < view.from || span.start > view.to) continue;
    const x = toX(span.start), width = Math.max(0.7, toX(span.end) - x);
    pen.globalAlpha = isSought(span) ? 1 : 0.15;
    pen.fillStyle = view.colours[span.kind];
    pen.fillRect(x, row.y, width > 2.5 ? width - 0.7 : width, row.height);
    if (span === view.hover) {
      pen.strokeStyle = view.colours.ink;
      pen.lineWidth = 2;
      pen.strokeRect(x, row.y, width, row.height);
    }
    const seen = Math.max(x, GUTTER), room = Math.min(x + width, view.width - 8) - seen;
    if (row.lane === 0 && room > 34 && pen.measureText(span.name).width < room - 8) {
      pen.fillStyle = view.colours.card;
      pen.textAlign = "left";
      pen.fillText(span.name, seen + 4, row.y + row.height / 2);
    }
  }
  pen.globalAlpha = 1;
  pen.restore();
}

function zoom(factor, around = (view.from + view.to) / 2) {
  const whole = view.step.ticks, length = Math.min(whole, Math.max(whole / 5000, (view.to - view.from) * factor));
  const from = around - (around - view.from) * (length / (view.to - view.from));
  look(from, length);
}
function look(from, length) {
  view.from = Math.min(view.step.ticks - length, Math.max(0, from));
  view.to = view.from + length;
  paint();
}
const move = (part) => look(view.from + part * (view.to - view.from), view.to - view.from);

function spanAt(event) {
  const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  const row = view.rows.find((one) => y >= one.y - 1 && y <= one.y + one.height + 1);
  const tick = toTick(x), reach = toTick(x + 1) - tick;
  return row && x >= GUTTER && row.spans.find((span) => tick >= span.start - reach && tick <= span.end + reach);
}
function describe(span) {
  const seconds = view.step.seconds / view.step.ticks;
  return [span.name, `${span.kind}, ${time((span.end - span.start) * seconds)}`, `rank ${span.rank}, ${span.lane}, from ${time(span.start * seconds)}`];
}
function hover(event) {
  const span = spanAt(event) || null;
  if (span) showTip(event, ...describe(span)); else hideTip();
  if (span !== view.hover) { view.hover = span; paint(); }
}

function press(event) {
  const moves = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": () => look(0, view.step.ticks),
    ArrowLeft: () => move(-0.15), ArrowRight: () => move(0.15), ArrowUp: () => walkRanks(-1), ArrowDown: () => walkRanks(1),
    ",": () => walkSpans(-1), ".": () => walkSpans(1), "/": () => find("#seek").focus() };
  if (!moves[event.key] || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  moves[event.key]();
}
function walkRanks(step) {
  view.rank = Math.min(view.step.shown - 1, Math.max(0, view.rank + step));
  view.at = -1;
  walkSpans(1);
}
function walkSpans(step) {
  const spans = spansOf(view.rank);
  view.at = Math.min(spans.length - 1, Math.max(0, view.at + step));
  if (spans[view.at]) goTo(spans[view.at]);
}
// What a rank does, in order of time; of what was sought, where anything was.
const spansOf = (rank) => view.rows.filter((row) => row.rank === rank).flatMap((row) => row.spans)
  .filter(isSought).sort((a, b) => a.start - b.start);
function goTo(span) {
  view.hover = span;
  find("#activity").textContent = describe(span).join(" · ");
  const length = view.to - view.from;
  if (span.start < view.from || span.end > view.to) look(span.start - length / 4, length); else paint();
}

// Activities whose layer or kind holds the text that was typed: the others are drawn pale.
function isSought(span) { return !view.sought || `${span.name} ${span.kind}`.toLowerCase().includes(view.sought); }
function seek() {
  view.sought = find("#seek").value.trim().toLowerCase();
  view.at = -1;
  view.hover = null;
  const spans = view.sought ? spansOf(view.rank) : [];
  const seconds = sum(spans.map((span) => span.end - span.start)) * view.step.seconds / view.step.ticks;
  find("#found").textContent = !view.sought ? "" : spans.length ? `${spans.length} on rank ${view.rank}, ${time(seconds)}` : "none";
  paint();
}
function seekNext(event) {
  if (event.key === "Escape") { event.target.value = ""; seek(); canvas.focus(); }
  if (event.key !== "Enter") return;
  event.preventDefault();
  const spans = spansOf(view.rank);
  if (!spans.length) return;
  view.at = (view.at + (event.shiftKey ? -1 : 1) + spans.length) % spans.length;
  const span = spans[view.at], length = Math.min(view.step.ticks, Math.max(20 * (span.end - span.start), view.step.ticks / 500));
  if (view.to - view.from > length) look((span.start + span.end - length) / 2, length);
  goTo(span);
}

function ranksTable(step) {
  const columns = ["rank", "computing", "not computing", "communication", "exposed"];
  find("#ranks").replaceChildren(
    make("thead", {}, make("tr", {}, columns.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, step.busy.map((busy, rank) => make("tr", {}, make("td", {}, String(rank)),
      [busy, Math.max(0, step.seconds - busy), step.communication[rank], step.exposed[rank]].map((seconds) => make("td", {}, time(seconds)))))));
}

function startTimeline() {
  find("#steps").replaceChildren(...(DATA.steps.length < 2 ? [] : DATA.steps.map((step, i) =>
    make("button", { type: "button", "data-step": i, onclick: () => showStep(i) }, step.label))));
  find("#zoom-in").onclick = () => zoom(0.6);
  find("#zoom-out").onclick = () => zoom(1 / 0.6);
  find("#zoom-all").onclick = () => look(0, view.step.ticks);
  let grip = null;
  canvas.addEventListener("pointerdown", (event) => { grip = { x: event.clientX, from: view.from }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { grip = null; });
  canvas.addEventListener("pointercancel", () => { grip = null; });
  canvas.addEventListener("pointerleave", () => { hideTip(); view.hover = null; paint(); });
  canvas.addEventListener("pointermove", (event) => {
    if (!grip) return hover(event);
    hideTip();
    const length = view.to - view.from;
    look(grip.from - (event.clientX - grip.x) / (view.width - GUTTER - 8) * length, length);
  });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, toTick(event.clientX - canvas.getBoundingClientRect().left)));
  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!event.ctrlKey && !event.metaKey && !sideways) return;
    event.preventDefault();
    if (sideways) move(event.deltaX / view.width);
    else zoom(Math.exp(event.deltaY / 200), toTick(event.clientX - canvas.getBoundingClientRect().left));
  }, { passive: false });
  canvas.addEventListener("keydown", press);
  find("#seek").addEventListener("input", seek);
  find("#seek").addEventListener("keydown", seekNext);
  showStep(DATA.steps.length - 1);
}
