// Puts the page together: the summary, the parts that have data, the theme.
function summary() {
  const tiles = [];
  const recorded = DATA.steps.find((step) => step.label === "recorded");
  if (plan) {
    const [, sample] = Object.entries(plan.rivals).find(([name]) => name.startsWith("sample")) || [];
    tiles.push([time(plan.step_seconds), recorded ? "predicted step" : "simulated step"]);
    if (recorded) tiles.push([time(recorded.seconds), "measured step"]);
    if (sample && sample.step_seconds) tiles.push([`${digits(sample.step_seconds / plan.step_seconds)}×`, "as fast as sample parallelism"]);
    if (sample) tiles.push([size(plan.moved_bytes), sample.moved_bytes ? `moved in a step; sample parallelism: ${size(sample.moved_bytes)}` : "moved in a step"]);
    tiles.push([size(plan.memory_bytes), "on the fullest rank"]);
    tiles.push([percent((recorded || plan).overlap), "of communication hidden"]);
    find("#subtitle").textContent = `${plan.workers} workers of ${plan.cluster}, ${plan.batch} samples a step, ${plan.layers.length} layers`;
  }
  for (const chart of DATA.charts.slice(0, 3)) for (const curve of chart.curves.slice(0, 1)) tiles.push([digits(curve.last, 4), `${curve.name.replaceAll("_", " ")}, last`]);
  find("#summary .tiles").replaceChildren(...tiles.map(([value, name]) => make("div", { class: "tile" }, make("b", {}, value), make("span", {}, name))));
}

function theme() {
  const button = find("#theme"), root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const apply = (name) => {
    if (name) { root.dataset.theme = name; root.style.colorScheme = name; }
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
    if (view.step) paint();
  };
  let kept = null;
  try { kept = localStorage.getItem("shardwise-theme"); } catch { /* a file may have no storage */ }
  apply(kept === "dark" || kept === "light" ? kept : null);
  button.onclick = () => {
    apply(isDark() ? "light" : "dark");
    try { localStorage.setItem("shardwise-theme", root.dataset.theme); } catch { /* as above */ }
  };
  dark.addEventListener("change", () => apply(null));
  // A canvas keeps its pixels: it is painted anew for paper, which is always light.
  addEventListener("beforeprint", () => { root.dataset.before = root.style.colorScheme; root.style.colorScheme = "light"; if (view.step) paint(); });
  addEventListener("afterprint", () => { root.style.colorScheme = root.dataset.before; if (view.step) paint(); });
}

summary();
if (present("plan", plan)) {
  find("#optimality").textContent = plan.optimality;
  drawPlan();
}
if (present("answers", DATA.answers.length)) {
  find("#answers .texts").replaceChildren(...DATA.answers.map(([sentence, rest]) => make("div", {},
    make("p", {}, sentence), rest ? make("div", { class: "wide" }, make("pre", { tabindex: 0 }, rest)) : [])));
}
if (present("rivals", plan && Object.keys(plan.rivals).length)) drawRivals();
if (present("bars", DATA.bars.layers.length)) drawBars();
if (present("timeline", DATA.steps.length)) startTimeline();
if (present("training", DATA.charts.length)) drawCharts();
if (present("memory", DATA.memory.predicted.length + DATA.memory.measured.length)) drawMemory();
if (present("settings", DATA.settings.length)) {
  find("#settings table").replaceChildren(make("tbody", {}, DATA.settings.map(([key, value]) => make("tr", {}, make("td", {}, key), make("td", {}, value)))));
}
find("#differing").textContent = DATA.differing;
find("#contents").append(make("ul", {}, [...document.querySelectorAll("section[data-title]:not([hidden])")].map((section) =>
  make("li", {}, make("a", { href: `#${section.id}` }, section.dataset.title)))));
find("#foot").textContent = `Shardwise ${DATA.version}`;
theme();
new ResizeObserver(() => { if (view.step && view.width !== canvas.parentElement.clientWidth) paint(); }).observe(canvas.parentElement);
