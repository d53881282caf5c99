"use strict";
(() => {
  const { drawings, dark: partners } = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const canPoint = matchMedia("(pointer: fine)").matches; // a finger that drags means to scroll
  let chosen = null; // the reader's own choice, over the system's
  const isDark = () => (chosen ? chosen === "dark" : system.matches);
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const plain = (colour) => (isDark() && Object.hasOwn(partners, colour) ? partners[colour] : colour);

  // A copy of a part of a figure in the colours of the theme: only what stands under "color" is a colour.
  const inTheme = (part, key) => {
    if (Array.isArray(part)) return part.map((each) => inTheme(each, key));
    if (part && typeof part === "object")
      return Object.fromEntries(Object.entries(part).map(([name, each]) => [name, inTheme(each, name)]));
    return key === "color" && typeof part === "string" ? plain(part) : part;
  };

  // Long titles of axes take two lines on a narrow screen.
  const title = (given) => {
    const text = typeof given === "object" ? given.text : given ?? "";
    return isNarrow() ? text.replace(/^(.{16,30}) (.{8,})$/, "$1<br>$2") : text;
  };

  const axis = (given) => ({
    gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--line"), zeroline: false, showline: true,
    ticks: "outside", tickcolor: css("--line"), ticklen: 4, ...given,
    tickfont: { ...(given?.tickfont ?? {}), color: css("--quiet") },
    title: { standoff: 10, ...(typeof given?.title === "object" ? given.title : {}), text: title(given?.title),
      font: { size: 13, color: css("--quiet") } },
  });

  const layoutInTheme = (given) => {
    const layout = inTheme(given);
    const font = { family: getComputedStyle(document.body).fontFamily, size: 13, color: css("--ink") };
    layout.annotations = (layout.annotations ?? []).map((each) => ({ ...each, font: { ...each.font, color: css("--quiet") } }));
    return {
      ...layout, font, dragmode: canPoint ? "zoom" : false, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { ...font, size: 13 }, align: "left" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--quiet"), activecolor: css("--ink") },
      xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis), ...(layout.yaxis2 ? { yaxis2: layout.yaxis2 } : {}),
    };
  };

  const tracesInTheme = (given, hidden) => given.map((trace) => {
    const themed = inTheme(trace);
    if (themed.marker && themed.mode) themed.marker.line = { ...themed.marker.line, color: css("--card") };
    if (themed.textposition) {
      const ground = css("--card"); // a halo, as names may stand on lines
      const shadow = ["1px 1px", "-1px -1px", "1px -1px", "-1px 1px"].map((at) => `${at} 2px ${ground}`).join(",");
      themed.textfont = { size: 12, color: css("--ink"), shadow };
    }
    if (themed.colorbar) themed.colorbar.tickfont = { size: 11, color: css("--quiet") };
    if (themed.error_y) themed.error_y.color = themed.marker.color;
    if (trace.meta && hidden.has(trace.meta.plan)) themed.visible = false;
    return themed;
  });

  const settings = {
    responsive: true, displaylogo: false, displayModeBar: "hover",
    // A list of what there is, so that no version of the library brings a button that sends data away.
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };
  const hiddenIn = (section) => new Set(
    [...section.querySelectorAll('.entry[aria-pressed="false"]')].map((entry) => Number(entry.dataset.plan)),
  );

  const picked = (place) => {
    const plan = document.getElementById(`${place}-plan`).value;
    const measure = document.getElementById(`${place}-measure`);
    const choices = drawings[place].choices;
    for (const option of measure.options) option.disabled = !Object.hasOwn(choices, `${plan}/${option.value}`);
    if (measure.selectedOptions[0].disabled) measure.value = [...measure.options].find((option) => !option.disabled).value;
    return atStep(place, choices[`${plan}/${measure.value}`]);
  };

  // Where bits follow a schedule, a slider shows those of one step in place of their range.
  const atStep = (place, figure) => {
    const slider = document.getElementById(`${place}-step`);
    const moving = figure.layout.meta;
    slider.parentElement.hidden = !moving?.follows;
    if (!moving?.follows) return figure;
    slider.max = moving.steps.length - 1;
    const number = Number(slider.value);
    slider.nextElementSibling.textContent = number < 0 ? "all" : String(moving.steps[number]);
    if (number < 0) return figure;
    const heat = figure.data[0];
    const bits = moving.follows.map((row) => row.map((schedule) => (schedule === null ? null : moving.bits[schedule][number])));
    const change = (grid, value) => grid.map((row, y) => row.map((cell, x) => (bits[y][x] === null ? cell : value(bits[y][x], cell))));
    const data = [{ ...heat, z: change(heat.z, Math.log2), text: change(heat.text, (width, text) => text.replace(/[0-9].*$/, width)) }];
    return { data, layout: figure.layout };
  };

  // The second run against the first: the ratio of their errors, or else the two formats.
  const compared = (place) => {
    const { rows, names, columns, runs, colours, ink } = drawings[place].pairs;
    const grid = () => rows.map(() => columns.map(() => null));
    const [z, text, hover] = [grid(), grid().map((row) => row.map(() => "")), grid().map((row) => row.map(() => ""))];
    const [first, second] = ["first", "second"].map((name) => {
      const cells = grid();
      for (const [y, x, format, error, word] of runs[document.getElementById(`${place}-${name}`).value])
        cells[y][x] = { format, error, word };
      return cells;
    });
    const percent = (value) => (value === null ? "not recorded" : `${(100 * value).toPrecision(3)} %`);
    const word = (cell) => cell?.word || "-";
    rows.forEach((_, y) => columns.forEach((_, x) => {
      const [a, b] = [first[y][x], second[y][x]];
      if (!a && !b) return;
      const ratio = a?.error > 0 && b?.error > 0 ? b.error / a.error : null;
      const differs = (a?.format ?? "") !== (b?.format ?? "");
      z[y][x] = ratio === null ? 0 : Math.max(-1, Math.min(1, Math.log10(ratio)));
      text[y][x] = ratio !== null ? `×${ratio.toPrecision(2)}` : differs ? `${word(a)} → ${word(b)}` : "=";
      hover[y][x] = `<b>${names[y]}</b><br>${a?.format || "left alone"}, error ${percent(a?.error ?? null)}<br>${b?.format || "left alone"}, error ${percent(b?.error ?? null)}`;
    }));
    const scale = colours.map((colour, number) => [number / (colours.length - 1), colour]);
    return {
      data: [{
        type: "heatmap", z, text, hovertext: hover, hoverinfo: "text", hoverongaps: false, texttemplate: "%{text}", x: columns,
        y: rows.map((_, y) => y), textfont: { size: 10, color: ink }, xgap: 2, ygap: 1, zmin: -1, zmax: 1, colorscale: scale,
        colorbar: { thickness: 10, outlinewidth: 0, len: 1, xpad: 4, ypad: 0, tickvals: [-1, 0, 1], ticktext: ["×0.1", "×1", "×10"] },
      }],
      layout: {
        height: Math.max(110 + 17 * rows.length, 200), margin: { l: 8, r: 16, t: 28, b: 8, pad: 2 }, hovermode: "closest",
        showlegend: false, xaxis: { side: "top", type: "category", tickangle: 0, showgrid: false, automargin: true },
        yaxis: { tickvals: rows.map((_, y) => y), ticktext: rows, tickfont: { size: 11 }, range: [rows.length - 0.5, -0.5],
          showgrid: false, zeroline: false, automargin: true },
      },
    };
  };

  // The whole axis in place of the part of it with the plans that work.
  const whole = new Set();
  const zoomed = (place, figure) => {
    if (!whole.has(place)) return figure;
    const range = figure.layout.meta.whole;
    const yaxis = { ...figure.layout.yaxis, range: range ?? undefined, autorange: !range };
    return { ...figure, layout: { ...figure.layout, yaxis } };
  };

  // On a narrow screen a heat map needs the room of its long names and of its scale for itself.
  const isNarrow = () => innerWidth < 520;
  const shortened = (name) => (name.length > 21 ? `${name.slice(0, 9)}…${name.slice(-11).replace(/^[^;]{0,4};/, "")}` : name);
  const narrowed = (figure) => {
    if (!isNarrow() || figure.data[0]?.type !== "heatmap") return figure;
    const { xaxis, yaxis } = figure.layout;
    const isCrowded = figure.data[0].x.length > 5;
    const hasNoRoom = figure.data[0].x.length > 8; // for texts in cells; a touch shows them
    return {
      data: figure.data.map((trace) => ({ ...trace, showscale: false, textfont: { ...trace.textfont, size: 9 },
        texttemplate: hasNoRoom ? "" : trace.texttemplate, text: trace.text.map((row) => row.map((text) => (isCrowded && text.includes("→") ? "≠" : text))),
        x: isCrowded ? trace.x.map((name) => name.replaceAll("<br>.", ".").replaceAll("<br>", " ")) : trace.x })),
      layout: { ...figure.layout,
        xaxis: { ...xaxis, tickfont: { size: 10 }, tickangle: hasNoRoom ? -90 : isCrowded ? -60 : 0, ...(xaxis.nticks ? {} : { dtick: 1 }) },
        yaxis: { ...yaxis, tickfont: { size: 10 }, ticktext: yaxis.ticktext.map(shortened) } },
    };
  };

  // Names of points stand beside them where there is room; the others are shown where the pointer is.
  const sides = ["middle right", "middle left", "top center", "bottom center", "top right", "bottom right", "top left", "bottom left"];
  const pen = document.createElement("canvas").getContext("2d");
  const overlap = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const placeNames = (element) => {
    const frame = element._fullLayout;
    const points = element.data.flatMap((trace, number) => {
      if (!trace.textposition || trace.visible === false) return [];
      const axis = frame[trace.yaxis === "y2" ? "yaxis2" : "yaxis"];
      const words = new DOMParser().parseFromString(trace.text[0], "text/html").body.textContent;
      return [{ number, words, x: frame.xaxis.d2p(trace.x[0]), y: axis.d2p(trace.y[0]), radius: trace.marker.size / 2 }];
    });
    if (!points.length) return undefined;
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const origin = element.querySelector(".nsewdrag").getBoundingClientRect();
    const boxes = (selector) => [...element.querySelectorAll(selector)].map((part) => {
      const { left, right, top, bottom } = part.getBoundingClientRect();
      return { left: left - origin.left, right: right - origin.left, top: top - origin.top, bottom: bottom - origin.top };
    });
    const markOf = ({ x, y, radius: r }, room) => ({ left: x - r - room, right: x + r + room, top: y - r - room, bottom: y + r + room });
    const taken = boxes(".annotation");
    const lines = [...boxes(".errorbar"), ...boxes(".shapelayer path"), ...boxes(".scatterlayer path.point")];
    const around = ({ x, y, radius, words }, side) => {
      const [width, height, gap] = [pen.measureText(words).width, 14, radius + 2];
      const left = side.endsWith("right") ? x + gap : side.endsWith("left") ? x - gap - width : x - width / 2;
      const top = side.startsWith("top") ? y - gap - height : side.startsWith("bottom") ? y + gap : y - height / 2;
      return { side, left, right: left + width, top, bottom: top + height };
    };
    const isInside = (box) => box.left >= 2 && box.right <= origin.width + 14 && box.top >= -20 && box.bottom <= origin.height;
    // Clear of other points, so that it is read as the name of its own.
    const isFree = (box, point) => isInside(box) && !taken.some((other) => overlap(box, other)) &&
      !points.some((other) => other !== point && overlap(box, markOf(other, 7)));
    const free = (point) => sides.map((side) => around(point, side)).filter((box) => isFree(box, point));
    const crossed = (box) => lines.filter((line) => overlap(box, line)).length;
    const chosen = new Map();
    for (const point of points.map((point) => [free(point).length, point]).sort((a, b) => a[0] - b[0]).map(([, point]) => point)) {
      const [best] = free(point).map((box) => [crossed(box), box]).sort((a, b) => a[0] - b[0]);
      if (best) taken.push({ ...best[1], left: best[1].left - 8, right: best[1].right + 8 });
      chosen.set(point.number, best?.[1].side);
    }
    const numbers = [...chosen.keys()];
    return Plotly.restyle(element, {
      textposition: numbers.map((number) => chosen.get(number) ?? sides[0]),
      mode: numbers.map((number) => (chosen.get(number) ? "markers+text" : "markers")),
    }, numbers);
  };

  const draw = (place) => {
    const element = document.getElementById(place);
    const drawing = drawings[place];
    const figure = narrowed(drawing.choices ? picked(place) : drawing.pairs ? compared(place) : zoomed(place, drawing));
    element.style.height = `${figure.layout.height}px`;
    const hidden = hiddenIn(element.closest(".experiment"));
    return Plotly.react(element, tracesInTheme(figure.data, hidden), layoutInTheme(figure.layout), settings)
      .then(() => placeNames(element));
  };

  const paint = () => {
    root.dataset.theme = isDark() ? "dark" : "light";
    const button = document.getElementById("theme");
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
    for (const sign of document.querySelectorAll("[data-color]")) sign.style.setProperty("--sign", plain(sign.dataset.color));
    return Promise.all(Object.keys(drawings).map(draw));
  };

  // --- what a reader can do ---

  document.getElementById("theme").addEventListener("click", () => { chosen = isDark() ? "light" : "dark"; paint(); });
  system.addEventListener("change", paint);
  let [resized, width] = [0, innerWidth];
  addEventListener("resize", () => {
    if (innerWidth === width) return; // the bars of a telephone's browser come and go
    width = innerWidth;
    clearTimeout(resized);
    resized = setTimeout(paint, 200);
  });

  // A plan that is hidden is in no chart of curves or points, and in no row of the tables of plans and runs.
  const showPlans = (section) => {
    const names = new Set();
    for (const entry of section.querySelectorAll(".entry"))
      if (entry.getAttribute("aria-pressed") === "false") names.add(entry.dataset.label);
    for (const table of section.querySelectorAll("table[data-sorts]"))
      for (const row of table.tBodies[0].rows) row.hidden = names.has(row.cells[0].dataset.order);
    for (const place of Object.keys(drawings))
      if (place.startsWith(`${section.id}-`) && !drawings[place].choices && !drawings[place].pairs) draw(place);
  };

  for (const entry of document.querySelectorAll(".entry")) {
    entry.addEventListener("click", () => {
      entry.setAttribute("aria-pressed", String(entry.getAttribute("aria-pressed") !== "true"));
      showPlans(entry.closest(".experiment"));
    });
  }

  const filterPlans = (field) => {
    const section = field.closest(".experiment");
    const part = field.value.trim().toLowerCase();
    for (const entry of section.querySelectorAll(".entry")) {
      const fits = entry.dataset.label.toLowerCase().includes(part);
      entry.parentElement.hidden = !fits;
      entry.setAttribute("aria-pressed", String(fits));
    }
    showPlans(section);
  };
  for (const field of document.querySelectorAll(".filter")) field.addEventListener("input", () => filterPlans(field));

  for (const button of document.querySelectorAll(".zoom")) {
    button.addEventListener("click", () => {
      const place = button.dataset.for;
      if (!whole.delete(place)) whole.add(place);
      button.setAttribute("aria-pressed", String(whole.has(place)));
      button.textContent = whole.has(place) ? "Show the plans that work" : "Show the whole axis";
      draw(place);
    });
  }

  for (const place of Object.keys(drawings)) {
    for (const control of ["plan", "measure", "first", "second"])
      document.getElementById(`${place}-${control}`)?.addEventListener("change", () => draw(place));
    document.getElementById(`${place}-step`)?.addEventListener("input", () => draw(place));
  }

  // Numbers by size, texts by alphabet, and what is missing always last.
  const compare = (a, b, sign) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    const [x, y] = [Number(a), Number(b)];
    const byNumber = !Number.isNaN(x) && !Number.isNaN(y);
    return sign * (byNumber ? x - y : a.localeCompare(b, undefined, { numeric: true }));
  };

  for (const table of document.querySelectorAll("table[data-sorts]")) {
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, column) => heading.querySelector("button").addEventListener("click", () => {
      const falling = heading.getAttribute("aria-sort") === "ascending";
      for (const each of headings) each.setAttribute("aria-sort", "none");
      heading.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => compare(a.cells[column].dataset.order, b.cells[column].dataset.order, falling ? -1 : 1));
      table.tBodies[0].append(...rows);
    }));
  }

  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const code = button.previousElementSibling;
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch { // no clipboard on this page: select it, so that a key copies
        const range = document.createRange();
        range.selectNodeContents(code);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }

  // While runs go on, the page loads itself again, and shows what the reader had chosen.
  const refresh = Number(root.dataset.refresh ?? 0);
  const chosenControls = () => [...document.querySelectorAll(".filter, .controls select, .controls input[type=range]")];
  if (refresh) {
    const kept = JSON.parse(sessionStorage.getItem(location.pathname) ?? "null");
    if (kept) {
      chosen = kept.chosen;
      chosenControls().forEach((control, number) => {
        if (kept.values[number] !== undefined && kept.values[number] !== "") control.value = kept.values[number];
      });
      for (const field of document.querySelectorAll(".filter")) if (field.value) filterPlans(field);
      for (const entry of document.querySelectorAll(".entry"))
        if (kept.hidden.includes(entry.dataset.label)) entry.click();
      for (const button of document.querySelectorAll(".zoom")) if (kept.whole.includes(button.dataset.for)) button.click();
      addEventListener("load", () => scrollTo(0, kept.scroll));
    }
    setTimeout(() => {
      const hidden = [...document.querySelectorAll('.entry[aria-pressed="false"]')].map((entry) => entry.dataset.label);
      const values = chosenControls().map((control) => control.value);
      sessionStorage.setItem(location.pathname, JSON.stringify({ chosen, values, hidden, whole: [...whole], scroll: scrollY }));
      location.reload();
    }, 1000 * refresh);
  }

  // Tests wait for this, and nothing else reads it.
  paint().then(() => { root.dataset.drawn = "true"; });
})();
