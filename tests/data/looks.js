// what tests/test_report_browser.py sees of a page
const looks = {
  // of every figure how many lines, bars, points and pictures it has
  drawn: () => [...document.querySelectorAll(".plot")].map(plot => {
    const marks = [...plot.querySelectorAll(".trace path, .heatmaplayer image, .bars path")];
    return marks.filter(mark => mark.tagName === "image" || (mark.getAttribute("d") || "").length > 4).length;
  }),

  // what is beyond the edge of the page, though no box lets one scroll to it
  tooWide: () => [...document.querySelectorAll("main *")]
    .filter(each => !each.closest(".scroll, svg") && each.getBoundingClientRect().right > innerWidth + 0.5)
    .map(each => each.outerHTML.slice(0, 80)),

  // by how much the faintest text and the faintest line stand out from the page (WCAG 2), and how bright that is
  contrasts: () => {
    const linear = v => (v <= 0.04 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const light = colour => {
      const [r, g, b] = colour.match(/[\d.]+/g).map(part => linear(part / 255));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const paper = light(getComputedStyle(document.body).backgroundColor);
    const against = colour => (Math.max(light(colour), paper) + 0.05) / (Math.min(light(colour), paper) + 0.05);
    const all = (where, name) => [...document.querySelectorAll(where)].map(each => against(getComputedStyle(each)[name]));
    return {
      text: Math.min(...all(".plot text", "fill"), ...all("h1, p, td, figcaption span, a", "color")),
      line: Math.min(...all(".plot .js-line[style*='stroke-width: 2px']", "stroke")),
      paper,
    };
  },

  // by how much a figure is wider than its place
  beyond: () => Math.max(...[...document.querySelectorAll(".plot")]
    .map(plot => plot.querySelector("svg").width.baseVal.value - plot.clientWidth)),

  // lines and bars of one run
  of: slot => [...document.querySelectorAll(".plot")].flatMap(plot => plot.data)
    .filter(trace => trace.meta === slot && trace.visible !== false).length,

  chip: slot => document.querySelector(`[data-slot="${slot}"]`),
  step: name => document.querySelector(`[data-step="${name}"]`).click(),
  sight: () => document.querySelector(".plot.zoom").layout.xaxis.range,
  grid: () => getComputedStyle(document.querySelector(".plot .xgrid")).stroke,

  // until the page has been told how it is seen, which happens between two frames, and Plotly of its width, 100 ms later
  async seen() {
    for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
    await new Promise(done => setTimeout(done, 150));
    await slipstream.drawn;
  },
};
