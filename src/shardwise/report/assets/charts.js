// Curves of the history: loss, accuracy, samples per second and whatever else was written.
const CURVES = ["forward", "gradients", "spatial", "f", "c", "copy"];
const PLOT = { width: 560, height: 240, left: 52, right: 12, top: 10, bottom: 36 };

function drawCharts() {
  find("#training .charts").replaceChildren(...DATA.charts.map(drawChart));
}

function drawChart(chart) {
  const xs = chart.curves.flatMap((curve) => curve.x), ys = chart.curves.flatMap((curve) => curve.y);
  const range = { x: [Math.min(...xs), Math.max(...xs)], y: padded(Math.min(...ys), Math.max(...ys)) };
  if (range.x[0] === range.x[1]) range.x = [range.x[0] - 1, range.x[1] + 1];
  const { width, height, left, right, top, bottom } = PLOT;
  const toX = (x) => left + (x - range.x[0]) / (range.x[1] - range.x[0]) * (width - left - right);
  const toY = (y) => height - bottom - (y - range.y[0]) / (range.y[1] - range.y[0]) * (height - top - bottom);
  const title = chart.title.replaceAll("_", " ");
  const picture = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": `${title} over ${chart.x}; last: ${chart.curves.map((curve) => `${curve.name} ${digits(curve.last, 4)}`).join(", ")}` },
    ticks(...range.y, 4).map((y) => [shape("line", { class: "grid", x1: left, x2: width - right, y1: toY(y), y2: toY(y) }),
      shape("text", { x: left - 8, y: toY(y) + 4, "text-anchor": "end" }, digits(y, 4))]),
    ticks(...range.x, 6).filter(Number.isInteger).map((x) => shape("text", { x: toX(x), y: height - 20, "text-anchor": "middle" }, digits(x, 6))),
    shape("text", { x: width - right, y: height - 5, "text-anchor": "end" }, chart.x),
    chart.curves.map((curve, i) => shape("polyline", { class: "curve", style: `--part: var(--${CURVES[i % CURVES.length]})`,
      points: curve.x.map((x, k) => `${toX(x).toFixed(1)},${toY(curve.y[k]).toFixed(1)}`).join(" ") })));
  const marks = shape("g", {});
  picture.append(marks);
  const reading = make("p", { class: "quiet", role: "status" });
  const all = [...new Set(xs)].sort((a, b) => a - b);
  let at = all.length - 1;
  const read = () => {
    const values = chart.curves.map((curve) => nearest(curve.x, all[at]));
    marks.replaceChildren(shape("line", { class: "cross", x1: toX(all[at]), x2: toX(all[at]), y1: top, y2: height - bottom }),
      ...chart.curves.map((curve, i) => shape("circle", { class: "dot", r: 4.5, style: `--part: var(--${CURVES[i % CURVES.length]})`, cx: toX(curve.x[values[i]]), cy: toY(curve.y[values[i]]) })));
    reading.textContent = `${chart.x} ${digits(all[at], 6)}: ${chart.curves.map((curve, i) => `${curve.name.replaceAll("_", " ")} ${digits(curve.y[values[i]], 4)}`).join(", ")}`;
  };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const x = range.x[0] + ((event.clientX - box.left) / box.width * width - left) / (width - left - right) * (range.x[1] - range.x[0]);
    at = nearest(all, x);
    read();
  });
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    at = Math.min(all.length - 1, Math.max(0, at + step));
    read();
  });
  const key = make("ul", { class: "legend" });
  legend(key, chart.curves.map((curve, i) => [curve.name.replaceAll("_", " "), `var(--${CURVES[i % CURVES.length]})`]));
  const each = Math.max(...chart.curves.map((curve) => curve.each));
  read();
  return make("div", { class: "chart" }, make("h3", {}, title), chart.curves.length > 1 ? key : [], picture, reading,
    each > 1 ? make("p", { class: "quiet" }, `Each point is the mean of up to ${each}.`) : []);
}

function padded(low, high) {
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}
function nearest(values, wanted) {
  return values.reduce((best, value, i) => (Math.abs(value - wanted) < Math.abs(values[best] - wanted) ? i : best), 0);
}
