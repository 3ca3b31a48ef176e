"use strict";
(function () {
  // Values under the pointer. Texts are made when the page is written and shown as text only.
  for (const figure of document.querySelectorAll("figure.chart")) {
    const svg = figure.querySelector("svg"), out = figure.querySelector("output"), cross = svg.querySelector(".cross");
    const at = svg.dataset.x.split(",").map(Number), texts = svg.dataset.text.split("\n");
    const box = svg.viewBox.baseVal, left = Number(svg.dataset.left), right = Number(svg.dataset.right);
    svg.addEventListener("pointermove", function (event) {
      const place = svg.getBoundingClientRect();
      const x = (event.clientX - place.left) / place.width * box.width;
      const share = (x - left) / (box.width - left - right);
      let best = 0;
      for (let i = 1; i < at.length; i++) {
        if (Math.abs(at[i] - share) < Math.abs(at[best] - share)) { best = i; }
      }
      out.textContent = texts[best];
      cross.setAttribute("transform", "translate(" + (left + at[best] * (box.width - left - right)) + " 0)");
      cross.style.opacity = "0.6";
    });
    svg.addEventListener("pointerleave", function () { cross.style.opacity = "0"; });
  }

  // Tables that sort by a column.
  function key(row, column) {
    const cell = row.cells[column];
    return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
  }
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = Array.from(table.tHead.rows[0].cells), body = table.tBodies[0];
    heads.forEach(function (head, column) {
      head.querySelector("button").addEventListener("click", function () {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach(function (each) { each.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = Array.from(body.rows);
        rows.sort(function (a, b) {
          const x = key(a, column), y = key(b, column);
          const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true });
          return down ? -order : order;
        });
        rows.forEach(function (row) { body.appendChild(row); });
      });
    });
  }

  // Zoom and move the timeline.
  for (const figure of document.querySelectorAll("figure.timeline")) {
    const zoom = figure.querySelector(".zoom"), out = figure.querySelector("output"), all = figure.querySelector("svg");
    const box = zoom.viewBox.baseVal, whole = { x: box.x, width: box.width }, ms = Number(zoom.dataset.ms);
    function show(x, width) {
      const wide = Math.min(Math.max(width, whole.width / 1e5), whole.width);
      const start = Math.min(Math.max(x, whole.x), whole.x + whole.width - wide);
      zoom.setAttribute("viewBox", start + " " + box.y + " " + wide + " " + box.height);
      for (const text of zoom.querySelectorAll("text")) {  // the drawing is stretched, its texts are not
        const place = Number(text.getAttribute("x"));
        text.setAttribute("transform", "translate(" + place + " 0) scale(" + wide / whole.width + " 1) translate(" + -place + " 0)");
      }
      const from = (start - whole.x) / whole.width * ms, to = (start + wide - whole.x) / whole.width * ms;
      out.textContent = from.toFixed(3) + " to " + to.toFixed(3) + " ms";
    }
    function around(share, factor) {
      const width = box.width * factor, now = box.x + share * box.width;
      show(now - share * Math.min(width, whole.width), width);
    }
    function share(event) {
      const place = all.getBoundingClientRect();
      const x = (event.clientX - place.left) / place.width * all.viewBox.baseVal.width;
      return Math.min(Math.max((x - whole.x) / whole.width, 0), 1);
    }
    zoom.setAttribute("tabindex", "0");
    zoom.addEventListener("wheel", function (event) {
      event.preventDefault();
      around(share(event), event.deltaY > 0 ? 1.25 : 0.8);
    }, { passive: false });
    zoom.addEventListener("dblclick", function () { show(whole.x, whole.width); });
    zoom.addEventListener("keydown", function (event) {
      if (event.key === "+" || event.key === "=") { around(0.5, 0.8); }
      if (event.key === "-") { around(0.5, 1.25); }
      if (event.key === "ArrowLeft") { show(box.x - box.width / 10, box.width); }
      if (event.key === "ArrowRight") { show(box.x + box.width / 10, box.width); }
    });
    let held = null;
    zoom.addEventListener("pointerdown", function (event) { held = { share: share(event), x: box.x }; zoom.setPointerCapture(event.pointerId); });
    zoom.addEventListener("pointermove", function (event) { if (held) { show(held.x - (share(event) - held.share) * box.width, box.width); } });
    zoom.addEventListener("pointerup", function () { held = null; });
  }
})();
