// Bars: time per layer, memory per rank, and the rivals.
const FEW = 20;
const shownBars = { all: false, order: "time" };

function drawBars() {
  const { parts, layers, seconds } = DATA.bars;
  const measured = seconds.recorded, predicted = seconds.simulated;
  find("#bars-title").textContent = measured && predicted ? "Predicted against measured, layer by layer" : "Time per layer";
  find("#bars .lead").textContent = "Milliseconds that a rank spends in a step, mean over the ranks: computing, copying what is sent or was received, and waiting for communication."
    + (measured && predicted ? " The pale bar is the prediction, the full one the measurement." : measured ? " Measured." : " Predicted.");
  legend(find("#parts"), parts.map((part) => [part, `var(--${part})`]));
  const totals = layers.map((_, i) => Math.max(...Object.values(seconds).map((rows) => sum(rows[i]))));
  const most = Math.max(...totals);
  const order = layers.map((_, i) => i);
  if (shownBars.order === "time") order.sort((a, b) => totals[b] - totals[a]);
  const few = shownBars.all ? order : order.slice(0, FEW);
  const both = [predicted && ["predicted", predicted], measured && ["measured", measured]].filter(Boolean);
  find("#bars .bars").replaceChildren(...few.map((i) => make("div", { class: "bar", "data-layer": layers[i],
    onpointermove: (event) => showTip(event, layers[i], ...both.map(([name, rows]) =>
      `${name}: ${parts.map((part, k) => `${part} ${time(rows[i][k])}`).join(", ")}`)), onpointerleave: hideTip },
  make("div", { class: "name" }, nameOf(layers[i])),
  make("div", { class: "pair" }, both.map(([name, rows]) =>
    track(parts.map((part, k) => [part, rows[i][k]]), most, both.length > 1 ? name : ""))),
  make("div", { class: "value" }, both.map(([name, rows]) => make("span", { class: both.length > 1 ? name : "" }, time(sum(rows[i]))))))));
  const button = find("#all");
  button.hidden = layers.length <= FEW;
  button.textContent = shownBars.all ? `Show ${FEW}` : `Show all ${layers.length}`;
  button.onclick = () => { shownBars.all = !shownBars.all; drawBars(); };
  find("#order").onchange = (event) => { shownBars.order = event.target.value; drawBars(); };
}
function nameOf(layer) {
  if (!plan || !plan.layers.some((one) => one.name === layer)) return layer;
  return make("button", { type: "button", onclick: () => { chooseName(layer); find("#plan").scrollIntoView(); } }, layer);
}

const RANKS = 64;
function drawMemory() {
  const { predicted, measured } = DATA.memory;
  const count = Math.max(predicted.length, measured.length);
  const most = Math.max(...predicted, ...measured);
  const both = [predicted.length && ["predicted", predicted], measured.length && ["measured", measured]].filter(Boolean);
  find("#memory .lead").textContent = `The most that a rank holds at once, ${both.map(([name]) => name).join(" (pale) and ")}.`
    + (count > RANKS ? ` The first ${RANKS} of ${count} ranks.` : "");
  find("#memory .bars").replaceChildren(...Array.from({ length: Math.min(count, RANKS) }, (_, rank) => make("div", { class: "bar" },
    make("div", { class: "name" }, `rank ${rank}`),
    make("div", { class: "pair" }, both.map(([name, held]) => track([["compute", held[rank] || 0]], most, both.length > 1 ? name : ""))),
    make("div", { class: "value" }, both.map(([name, held]) => make("span", { class: both.length > 1 ? name : "" }, size(held[rank] || 0)))))));
  find("#memory .charts").replaceChildren(...(DATA.memory.over_time ? [drawChart(DATA.memory.over_time)] : []));
}

function drawRivals() {
  const rows = [{ ...plan, name: "this plan", split: "", chosen: true }, ...Object.entries(plan.rivals).map(([name, rival]) => ({ name, ...rival }))];
  const columns = [["step_seconds", "step", time], ["cost_seconds", "cost, nothing hidden", time], ["moved_bytes", "moved in a step", size], ["memory_bytes", "fullest rank", size]]
    .filter(([key]) => rows.every((row) => row[key] > 0 || key === "moved_bytes"));
  const most = Object.fromEntries(columns.map(([key]) => [key, Math.max(...rows.map((row) => row[key]))]));
  find("#rivals table").replaceChildren(
    make("thead", {}, make("tr", {}, ["plan", "split of most layers", ...columns.map(([, title]) => title)].map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, rows.map((row) => make("tr", row.chosen ? { class: "chosen" } : {},
      make("td", {}, row.name), make("td", { "data-column": "split of most layers" }, row.split),
      columns.map(([key, title, text]) => make("td", { "data-column": title }, make("div", { class: "measure" }, track([["edge", row[key]]], most[key]), make("span", {}, text(row[key])))))))));
}
