"use strict";
// Draw every figure of the page with the page's colours, so that figures adapt to dark mode and to paper.
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figure-data").textContent);
  const coarse = matchMedia("(pointer: coarse)").matches;
  const named = /^var\(--([\w-]+)(?:\/([\d.]+))?\)$/;

  function paint(value) {
    if (Array.isArray(value)) return value.every(each => typeof each === "number") ? value : value.map(paint);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, paint(each)]));
    }
    const match = typeof value === "string" && value.match(named);
    if (!match) return value;
    const hex = getComputedStyle(root).getPropertyValue("--" + match[1]).trim();
    const [r, g, b] = [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
    return match[2] ? `rgba(${r},${g},${b},${match[2]})` : hex;
  }

  function merge(base, own) {
    if (!own || typeof own !== "object" || Array.isArray(own) || !base) return own === undefined ? base : own;
    const keys = new Set([...Object.keys(base), ...Object.keys(own)]);
    return Object.fromEntries([...keys].map(key => [key, merge(base[key], own[key])]));
  }

  function common(figure, width) {
    const axis = {
      gridcolor: "var(--grid)", linecolor: "var(--line)", zerolinecolor: "var(--line)", zerolinewidth: 1,
      automargin: true, exponentformat: "power", minexponent: 4, title: { standoff: 6, font: { size: 12, color: "var(--soft)" } }, fixedrange: coarse && !figure.zoom,
      tickfont: { size: 11, color: "var(--soft)" },
    };
    const across = { ...axis, zeroline: false };
    return {
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: "var(--ink)" },
      separators: ".", paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 48, r: 10, t: 8, b: 40 }, height: figure.height, width: width || undefined, autosize: !width,
      xaxis: across, yaxis: axis, colorway: [1, 2, 3, 4, 5, 6, 7, 8].map(i => `var(--s${i})`),
      hovermode: "x unified", hoverlabel: { bgcolor: "var(--paper)", bordercolor: "var(--line)", font: { size: 12, color: "var(--ink)" } },
      showlegend: figure.legend, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", font: { size: 12 } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: "var(--soft)", activecolor: "var(--ink)" },
      dragmode: figure.zoom ? (coarse ? "pan" : "zoom") : (coarse ? false : "zoom"),
    };
  }

  const config = figure => ({
    responsive: true, displaylogo: false, displayModeBar: !coarse,
    scrollZoom: false, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"],
    toImageButtonOptions: { format: "svg" },
  });

  const hidden = new Set();
  function shown(data) {
    return data.map(trace => ({ ...trace, visible: !(typeof trace.meta === "number" && hidden.has(trace.meta)) }));
  }

  function draw(id, width) {
    const figure = figures[id];
    const layout = merge(common(figure, width), figure.layout);
    return Plotly.react(id, paint(shown(figure.data)), paint(layout), config(figure));
  }

  // unpack plotly.js, which the page holds compressed, and run it
  async function unpack() {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), each => each.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  async function all() {
    await library;
    for (const id of Object.keys(figures)) {
      await draw(id);
      await new Promise(done => setTimeout(done));
    }
    root.dataset.drawn = Object.keys(figures).length;
  }

  function again() {
    window.slipstream.drawn = all();
  }

  // one legend for the whole page: it shows or hides a run in all figures
  for (const chip of document.querySelectorAll("[data-slot]")) {
    chip.addEventListener("click", () => {
      const slot = Number(chip.dataset.slot), off = !hidden.has(slot);
      off ? hidden.add(slot) : hidden.delete(slot);
      chip.setAttribute("aria-pressed", String(!off));
      again();
    });
  }

  // buttons, which also work with a keyboard and on phones
  const steps = {
    in: (a, b) => [a + (b - a) / 4, b - (b - a) / 4], out: (a, b) => [a - (b - a) / 2, b + (b - a) / 2],
    back: (a, b) => [a - (b - a) / 2, b - (b - a) / 2], on: (a, b) => [a + (b - a) / 2, b + (b - a) / 2],
  };
  for (const button of document.querySelectorAll("[data-step]")) {
    button.addEventListener("click", () => {
      const plot = button.closest("figure").querySelector(".plot"), step = steps[button.dataset.step];
      const [a, b] = plot.layout.xaxis.range;
      Plotly.relayout(plot, step ? { "xaxis.range": step(a, b) } : { "xaxis.autorange": true });
    });
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);

  // print with a fixed width and light colours, whatever the window has
  const PAPER = { wide: 680, narrow: 332 };
  addEventListener("beforeprint", () => {
    root.dataset.scheme = "light";
    for (const id of Object.keys(figures)) {
      draw(id, document.getElementById(id).closest("figure").classList.contains("wide") ? PAPER.wide : PAPER.narrow);
    }
  });
  addEventListener("afterprint", () => { delete root.dataset.scheme; again(); });

  addEventListener("error", event => { root.dataset.error = String(event.message); });
  addEventListener("unhandledrejection", event => { root.dataset.error = String(event.reason); });

  // number of rows: one if all names fit, else columns as wide as the longest name
  function legendRows(data, room) {
    const widths = data.filter(trace => trace.name && trace.showlegend !== false).map(trace => 46 + 6.8 * trace.name.length);
    const all = widths.reduce((sum, each) => sum + each, 0);
    return all <= room ? 1 : Math.ceil(widths.length / Math.max(1, Math.floor(room / Math.max(...widths))));
  }

  function svg(id, width) {
    const figure = figures[id];
    const lines = figure.title.split("<br>").length, rows = figure.legend ? legendRows(figure.data, width - 72) : 0;
    const height = figure.height + 20 + 20 * lines + 20 * Math.max(0, rows - 1);
    const top = lines > 1 ? 20 : 8; // plotly aligns the first of several lines by its bottom
    const title = { text: figure.title, x: 0.01, xanchor: "left", y: 1 - top / height, yanchor: "top", font: { size: 15, weight: 600 } };
    const room = { title, paper_bgcolor: "var(--paper)", margin: { l: 56, r: 16, t: 18 + 20 * lines + 4 * Math.sign(rows) + 20 * rows, b: 48 } };
    const layout = paint(merge(merge(common(figure, width), figure.layout), { ...room, height }));
    return Plotly.toImage({ data: paint(figure.data), layout }, { format: "svg", width, height });
  }

  const library = Object.keys(figures).length ? unpack() : Promise.resolve();
  window.slipstream = { svg };
  again();
})();
