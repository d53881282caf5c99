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

  const axis = (given) => ({
    gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--line"), zeroline: false, showline: true,
    ticks: "outside", tickcolor: css("--line"), ticklen: 4, ...given,
    tickfont: { ...(given?.tickfont ?? {}), color: css("--quiet") },
    title: { standoff: 10, ...(typeof given?.title === "object" ? given.title : { text: given?.title ?? "" }),
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
    if (themed.mode?.includes("text")) {
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
    const error = measure.querySelector('[value="error"]');
    error.disabled = !Object.hasOwn(choices, `${plan}/error`);
    const format = measure.querySelector('[value="format"]');
    format.disabled = !Object.hasOwn(choices, `${plan}/format`);
    if (measure.selectedOptions[0].disabled) measure.value = error.disabled ? "format" : "error";
    return choices[`${plan}/${measure.value}`];
  };

  // On a narrow screen a heat map needs the room of its long names and of its scale for itself.
  const isNarrow = () => innerWidth < 520;
  const tail = (name) => (name.length > 15 ? `…${name.slice(-14).replace(/^[^;]{0,4};/, "")}` : name);
  const narrowed = (figure) => {
    if (!isNarrow() || figure.data[0]?.type !== "heatmap") return figure;
    const { xaxis, yaxis } = figure.layout;
    const isCrowded = figure.data[0].x.length > 5;
    return {
      data: figure.data.map((trace) => ({ ...trace, showscale: false, textfont: { size: 9 },
        x: isCrowded ? trace.x.map((name) => name.replaceAll("<br>.", ".").replaceAll("<br>", " ")) : trace.x })),
      layout: { ...figure.layout,
        xaxis: { ...xaxis, tickfont: { size: 10 }, tickangle: isCrowded ? -60 : 0 },
        yaxis: { ...yaxis, tickfont: { size: 10 }, ticktext: yaxis.ticktext.map(tail) } },
    };
  };

  const draw = (place) => {
    const element = document.getElementById(place);
    const figure = narrowed(drawings[place].choices ? picked(place) : drawings[place]);
    element.style.height = `${figure.layout.height}px`;
    const hidden = hiddenIn(element.closest(".experiment"));
    return Plotly.react(element, tracesInTheme(figure.data, hidden), layoutInTheme(figure.layout), settings);
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
  matchMedia("(max-width: 519px)").addEventListener("change", paint);

  for (const entry of document.querySelectorAll(".entry")) {
    entry.addEventListener("click", () => {
      entry.setAttribute("aria-pressed", String(entry.getAttribute("aria-pressed") !== "true"));
      const key = entry.closest(".legend").dataset.for;
      for (const place of Object.keys(drawings)) if (place.startsWith(`${key}-`) && !drawings[place].choices) draw(place);
    });
  }

  for (const place of Object.keys(drawings)) {
    if (!drawings[place].choices) continue;
    for (const control of ["plan", "measure"])
      document.getElementById(`${place}-${control}`).addEventListener("change", () => draw(place));
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

  // Tests wait for this, and nothing else reads it.
  paint().then(() => { root.dataset.drawn = "true"; });
})();
