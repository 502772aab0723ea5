// The plan drawn over the layer graph, and one layer's costs and alternatives.
const SPLITS = { n: "samples (n)", spatial: "spatial (d h w)", f: "filters (f)", c: "channels (c)", mixed: "several axes", whole: "not split" };
const plan = DATA.plan;
const cost = (layer) => (layer.compute_seconds || 0) + (layer.transfer_seconds || 0) + (layer.update_seconds || 0);
const isFewer = (layer) => layer.workers < plan.workers;
const chosen = { block: -1, layer: -1, scale: 1 };

function drawPlan() {
  const { drawing, layers } = plan;
  const used = new Set(layers.map((layer) => layer.kind));
  legend(find("#splits"), Object.keys(SPLITS).filter((kind) => used.has(kind)).map((kind) => [SPLITS[kind], `var(--${kind})`])
    .concat(layers.some(isFewer) ? [["fewer workers", "few"]] : []));
  const most = Math.max(...drawing.blocks.map(([, , members]) => sum(members.map((i) => cost(layers[i])))));
  const edges = drawing.edges.map((edge) => shape("path", { class: edge.bytes ? "edge moves" : "edge", d: path(edge.points) },
    shape("title", {}, edge.bytes ? `${size(edge.bytes)} move in a step` : "nothing moves")));
  const blocks = drawing.blocks.map((block, i) => drawBlock(block, i, most));
  const picture = shape("svg", { viewBox: `0 0 ${drawing.width} ${drawing.height}`, role: "group", "aria-label": "Layer graph" }, STRIPES(), edges, blocks);
  find("#graph").replaceChildren(picture);
  const room = find("#graph").clientWidth || drawing.width;
  resize(Math.min(1, Math.max(0.8, room / drawing.width)));
  find("#graph").scrollLeft = (drawing.width * chosen.scale - room) / 2;
  find("#larger").onclick = () => resize(chosen.scale * 1.2);
  find("#smaller").onclick = () => resize(chosen.scale / 1.2);
  find("#graph").addEventListener("keydown", walk);
  find("#layer-names").replaceChildren(...layers.map((layer) => make("option", { value: layer.name })));
  find("#layer-name").addEventListener("input", (event) => chooseName(event.target.value.trim()));
  find("#layer-name").addEventListener("keydown", (event) => {
    const near = layers.find((layer) => layer.name.toLowerCase().includes(event.target.value.trim().toLowerCase()));
    if (event.key === "Enter" && near) chooseName(near.name);
  });
  const costs = drawing.blocks.map(([, , members]) => sum(members.map((i) => cost(layers[i]))));
  choose(costs.indexOf(most));
}

const STRIPES = () => shape("defs", {}, shape("pattern", { id: "stripes", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
  shape("rect", { class: "stripe", width: 2.5, height: 7 })));

function resize(scale) {
  chosen.scale = Math.min(3, Math.max(0.2, scale));
  const picture = find("#graph svg");
  picture.setAttribute("width", plan.drawing.width * chosen.scale);
  picture.setAttribute("height", plan.drawing.height * chosen.scale);
}

function path(points) {
  let text = `M${points[0]}`;
  for (let i = 1; i < points.length; i++) {
    const [x0, y0] = points[i - 1], [x1, y1] = points[i], middle = (y0 + y1) / 2;
    text += x0 === x1 ? `L${x1},${y1}` : `C${x0},${middle} ${x1},${middle} ${x1},${y1}`;
  }
  return text;
}

function drawBlock([x, y, members], i, most) {
  const [width, height] = plan.drawing.block;
  const first = plan.layers[members[0]];
  const seconds = sum(members.map((k) => cost(plan.layers[k])));
  const operators = members.map((k) => plan.layers[k].op).join("+").replaceAll("batch_norm", "norm");
  const isInput = first.op === "input";
  return shape("g", {
    class: `block ${first.kind}${isInput ? " input" : ""}`, transform: `translate(${x - width / 2},${y})`,
    tabindex: -1, role: "button", "aria-pressed": "false", "data-block": i,
    "aria-label": `${first.name}, ${operators}, split ${first.split}, ${time(seconds)}`,
    onclick: () => choose(i),
    onpointermove: (event) => showTip(event, first.name, operators, `split ${first.split}`, isInput ? "" : `cost ${time(seconds)}`),
    onpointerleave: hideTip,
  },
  shape("rect", { class: "box", width, height, rx: 7 }),
  isFewer(first) ? shape("rect", { width, height, rx: 7, fill: "url(#stripes)" }) : [],
  shape("path", { class: "side", d: `M7,0h-1a7,7 0 0 0 -6,7v${height - 14}a7,7 0 0 0 6,7h1z` }),
  shape("text", { x: 14, y: 16 }, ending(first.name, 23)),
  shape("text", { class: "sub", x: 14, y: 30 }, clipped(isInput ? `input, ${first.split}` : `${first.split} · ${operators}`, 28)),
  isInput ? [] : [
    shape("rect", { class: "rail", x: 14, y: height - 6, width: width - 22, height: 3, rx: 1.5 }),
    shape("rect", { class: "cost", x: 14, y: height - 6, width: most ? (width - 22) * seconds / most : 0, height: 3, rx: 1.5 })]);
}
const clipped = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
// Long names differ at their ends.
const ending = (text, most) => (text.length > most ? `…${text.slice(text.length - most + 1)}` : text);

function walk(event) {
  const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
  const press = event.key === "Enter" || event.key === " ";
  if (!step && !press) return;
  event.preventDefault();
  const last = plan.drawing.blocks.length - 1;
  choose(Math.min(last, Math.max(0, chosen.block + (step || 0))));
  const block = find(`[data-block="${chosen.block}"]`);
  block.focus({ preventScroll: true });
  block.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function choose(i, member) {
  const before = find(`[data-block="${chosen.block}"]`);
  if (before) { before.setAttribute("aria-pressed", "false"); before.setAttribute("tabindex", -1); }
  const block = find(`[data-block="${i}"]`);
  block.setAttribute("aria-pressed", "true");
  block.setAttribute("tabindex", 0);
  const members = plan.drawing.blocks[i][2];
  chosen.block = i;
  chosen.layer = member === undefined ? members[0] : member;
  showLayer(plan.layers[chosen.layer], members, i);
}
function chooseName(name) {
  const layer = plan.layers.findIndex((one) => one.name === name);
  const i = plan.drawing.blocks.findIndex(([, , members]) => members.includes(layer));
  if (i < 0) return;
  choose(i, layer);
  const pane = find("#graph"), [x, y] = plan.drawing.blocks[i];
  pane.scrollTo(x * chosen.scale - pane.clientWidth / 2, y * chosen.scale - pane.clientHeight / 2);
}

function showLayer(layer, members, block) {
  const chips = members.length < 2 ? [] : make("div", { class: "chips", role: "group", "aria-label": "Layers of this block" },
    members.map((k) => make("button", { type: "button", "aria-pressed": String(k === chosen.layer), title: plan.layers[k].name,
      onclick: () => { choose(block, k); find(`#layer [aria-pressed="true"]`).focus(); } }, plan.layers[k].op)));
  const facts = [["operator", layer.op], ["output", layer.shape.join("×")], ["workers", `${layer.workers} of ${plan.workers}`]];
  if (layer.compute_seconds !== undefined) facts.push(["compute", time(layer.compute_seconds)], ["transfer", time(layer.transfer_seconds)], ["update", time(layer.update_seconds)],
    ["moved", size(layer.moved_bytes)], ["memory", size(layer.memory_bytes)], ["share of cost", percent(cost(layer) / plan.cost_seconds)]);
  find("#layer").replaceChildren(
    make("h3", {}, layer.name),
    make("p", {}, make("span", { class: `badge ${layer.kind}` }, layer.split), ` ${SPLITS[layer.kind]}${isFewer(layer) ? ", on fewer workers" : ""}`, layer.whole ? " — has no strategy" : ""),
    ...[chips].flat(),
    make("dl", {}, facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))),
    ...alternatives(layer));
}

function alternatives(layer) {
  if (!layer.alternatives || !layer.alternatives.length) return [];
  const rows = layer.alternatives.map(([split, ...rest]) => ({ split, seconds: rest.slice(0, 4), chosen: rest[4] }));
  const totals = rows.map((row) => sum(row.seconds));
  const most = Math.min(Math.max(...totals), 6 * Math.min(...totals)); // bars of the worst are cut off
  const parts = ["transfer", "compute", "update", "onward"];
  const key = make("ul", { class: "legend" });
  legend(key, parts.map((part) => [part, `var(--${part})`]));
  return [
    make("div", { class: "wide" }, make("table", { id: "alternatives" },
      make("caption", {}, "Alternatives, all other layers as planned; ms"),
      make("thead", {}, make("tr", {}, ["split", "", ...parts, "total"].map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, rows.map((row) => make("tr", row.chosen ? { class: "chosen", "aria-current": "true" } : {},
        make("td", {}, row.chosen ? row.split : make("button", { type: "button", class: "plain", title: "Why not?",
          onclick: () => { find("#why").textContent = whyNot(row, rows.find((one) => one.chosen), parts); } }, row.split)), make("td", {}, track(parts.map((part, k) => [part, row.seconds[k]]), most)),
        [...row.seconds, sum(row.seconds)].map((seconds) => make("td", {}, digits(1e3 * seconds)))))))),
    make("p", { id: "why", role: "status" }, "Choose a split: why not that one?"),
    key,
    make("p", { class: "quiet" }, "Onward is what carrying the output to its readers takes.")];
}

// One alternative against the chosen split, part by part, the largest difference first.
function whyNot(row, planned, parts) {
  if (!planned) return "";
  const more = parts.map((part, k) => [part, row.seconds[k] - planned.seconds[k]]).filter(([, seconds]) => Math.abs(seconds) > 1e-9)
    .sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
  const total = sum(more.map(([, seconds]) => seconds));
  const signed = (seconds) => `${seconds < 0 ? "−" : "+"}${time(Math.abs(seconds))}`;
  if (!more.length) return `${row.split} costs the same as ${planned.split}, all other layers as planned.`;
  return `${row.split} instead of ${planned.split}: ${signed(total)} (${more.map(([part, seconds]) => `${part} ${signed(seconds)}`).join(", ")}), all other layers as planned`
    + (total < 0 ? "; the plan gives up this gain for its neighbours, for memory, or because of what can be hidden." : ".");
}
