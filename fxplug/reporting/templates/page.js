"use strict";
(() => {
const page = JSON.parse(document.getElementById("data").textContent);
const region = document.getElementById("region"), tree = document.getElementById("tree");
const make = (tag, text, attributes = {}) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};
const link = path => "#" + encodeURIComponent(path);
// a box is [name, kind, label, kind of the region, passes, members, state]
const NAME = 0, KIND = 1, LABEL = 2, INNER = 3, PASSES = 4, MEMBERS = 5, LEAST = 0.72;
const join = (outer, name) => outer === "" ? name : outer.split("@")[0] + "." + name;
const inside = function* (kind, path) {
  for (const box of page.kinds[kind].boxes)
    for (const each of box[MEMBERS] && box[KIND] === "repeat" ? box[MEMBERS].flat() : [box])
      if (["region", "layer"].includes(each[KIND])) yield [join(path, each[NAME]), each, box];
};
// the region of a path: its kind and the regions around it; or the one that has the layer, and the box in it
const resolve = wanted => {
  let kind = page.root, path = "", trail = [["", kind]], last = null;
  while (path !== wanted) {
    let next = null;
    for (const found of inside(kind, path))
      if ((found[0] === wanted || wanted.startsWith(found[0] + ".") || wanted.startsWith(found[0] + "@")) && (!next || found[0].length > next[0].length)) next = found;
    if (!next) break;
    last = next;
    if (next[1][INNER] === null) { path = next[0]; break; }
    path = next[0]; kind = next[1][INNER]; trail.push([path, kind]);
  }
  const box = last && last[1][INNER] === null ? page.kinds[kind].boxes.indexOf(last[2]) : -1;
  return { kind, path: trail[trail.length - 1][0], trail, box, exact: path === wanted, last };
};
const about = (text, items) => {
  const told = region.querySelector(".about");
  told.replaceChildren(text);
  if (items) { const list = make("ul"); list.append(...items); told.append(list); }
};
const tell = (box, path) => {
  region.querySelectorAll(".chosen").forEach(each => each.classList.remove("chosen"));
  region.querySelector(`[data-box="${box}"]`)?.classList.add("chosen");
  const found = page.kinds[resolve(path).kind].boxes[box];
  if (found[KIND] !== "repeat") { about(region.querySelector(`[data-box="${box}"] title`).textContent.split("\n").join(" · ")); return; }
  const groups = new Map();
  for (const period of found[MEMBERS]) {
    const main = period.find(each => each[KIND] === "region" || each[KIND] === "layer");
    const key = main[INNER] === null ? "layer" : main[INNER];
    groups.set(key, [...(groups.get(key) || []), main[NAME]]);
  }
  const most = Math.max(...[...groups.values()].map(names => names.length));
  const differ = found[MEMBERS].length - most;
  const beside = found[MEMBERS][0].length > 1 ? ", each with " + found[MEMBERS][0].slice(1).map(each => each[NAME] + " (" + each[LABEL] + ")").join(", ") : "";
  const items = [...groups.values()].flat().map(name => {
    const item = make("li"), to = make("a", name, { href: link(join(path, name)) });
    item.append(to);
    if (differ && [...groups.values()].find(names => names.includes(name)).length < most) item.append(" differs");
    return item;
  });
  about(`${found[MEMBERS].length} × ${found[LABEL]}, ${differ ? `${most} alike; ${differ} differ` : "all alike"}${beside}:`, items);
};
const open = (wanted, focus) => {
  const found = resolve(wanted);
  region.replaceChildren(document.getElementById("k" + found.kind).content.cloneNode(true));
  const title = region.querySelector(".path");
  found.trail.forEach(([path], index) => {
    const name = index === 0 ? page.title : path.slice(found.trail[index - 1][0] === "" ? 0 : found.trail[index - 1][0].split("@")[0].length + 1);
    if (index) title.append(make("span", "›", { class: "sep", "aria-hidden": "true" }));
    title.append(index === found.trail.length - 1 ? make("span", name) : make("a", name, { href: path === "" ? "#" : link(path) }));
  });
  const times = page.times[found.kind];
  if (times > 1) region.querySelector(".alike").textContent = ` · ${times} alike in the model`;
  region.querySelectorAll("a[data-box]").forEach(each => {
    const box = page.kinds[found.kind].boxes[each.dataset.box];
    each.setAttribute("href", ["region", "layer"].includes(box[KIND]) ? link(join(found.path, box[NAME])) : location.hash || "#");
    if (["repeat", "block"].includes(box[KIND])) each.addEventListener("click", event => { event.preventDefault(); tell(each.dataset.box, found.path); });
  });
  if (found.box >= 0) tell(found.box, found.path);
  else if (!found.exact) about(`There is no region '${wanted}'; this is the nearest one around it.`);
  fit();
  reveal(found.trail);
  if (focus) region.focus({ preventScroll: true });
};
// a picture takes the width that there is, unless its letters became too small
const fit = () => {
  const drawing = region.querySelector(".drawing"), svg = drawing.querySelector("svg"), [, , width, height] = svg.getAttribute("viewBox").split(" ");
  const scale = Math.max(LEAST, Math.min(1, (drawing.clientWidth - 16) / width));
  svg.setAttribute("width", Math.round(width * scale)); svg.setAttribute("height", Math.round(height * scale));
  drawing.scrollLeft = (drawing.scrollWidth - drawing.clientWidth) / 2;
};
const branch = (kind, path) => {
  const list = make("ul");
  for (const [inner, box] of inside(kind, path)) {
    if (box[INNER] === null) continue;
    const item = make("li"), row = make("div", undefined, { class: "row", "data-path": inner });
    const has = [...inside(box[INNER], inner)].some(each => each[1][INNER] !== null);
    if (has) {
      const button = make("button", undefined, { type: "button", "aria-expanded": "false", "aria-label": "inside of " + inner });
      button.addEventListener("click", () => unfold(item, box[INNER], inner));
      row.append(button);
    } else row.append(make("span", undefined, { class: "none" }));
    const to = make("a", undefined, { href: link(inner), title: inner + "\n" + [box[LABEL], ...box[PASSES]].join(" · ") });
    for (const name of box[PASSES]) to.append(make("span", undefined, { class: "chip " + page.colours[name] }));
    to.append(box[NAME], make("span", box[LABEL], { class: "soft" }));
    row.append(to); item.append(row); list.append(item);
  }
  return list;
};
const unfold = (item, kind, path, only) => {
  const button = item.querySelector(":scope > .row button"), there = item.querySelector(":scope > ul");
  if (!button) return;
  if (there && only) return;
  if (there) { there.remove(); button.setAttribute("aria-expanded", "false"); return; }
  item.append(branch(kind, path)); button.setAttribute("aria-expanded", "true");
};
const rowOf = path => [...tree.querySelectorAll(".row")].find(row => row.dataset.path === path);
const reveal = trail => {
  tree.querySelectorAll(".here").forEach(row => { row.classList.remove("here"); row.querySelector("a").removeAttribute("aria-current"); });
  trail.slice(0, -1).forEach(([path, kind]) => { const row = path && rowOf(path); if (row) unfold(row.parentElement, kind, path, true); });
  const row = rowOf(trail[trail.length - 1][0]);
  if (!row) return;
  row.classList.add("here"); row.querySelector("a").setAttribute("aria-current", "true");
  if (row.offsetTop < tree.scrollTop || row.offsetTop > tree.scrollTop + tree.clientHeight - 30) tree.scrollTop = row.offsetTop - 60;
};
const wanted = () => { try { return decodeURIComponent(location.hash.slice(1)); } catch { return location.hash.slice(1); } };
const sections = new Set([...document.querySelectorAll("main > section[id]")].map(each => each.id));
const go = focus => {
  const start = performance.now(), path = wanted();
  const elsewhere = sections.has(path) && !resolve(path).exact;
  if (elsewhere && focus) return;
  open(elsewhere ? "" : path, focus);
  region.getBoundingClientRect();
  document.documentElement.dataset.took = (performance.now() - start).toFixed(1);
};

if (tree) {
  tree.append(make("div", undefined, { class: "row", "data-path": "" }), branch(page.root, ""));
  tree.firstChild.append(make("span", undefined, { class: "none" }), make("a", page.title, { href: "#" }));
  document.querySelectorAll("[name=view]").forEach(each => each.addEventListener("change", () => { document.documentElement.dataset.view = each.value; }));
  addEventListener("hashchange", () => go(true));
  go(false);

  // search: all paths of the model, made when first asked for
  let index = null;
  const field = document.getElementById("search"), found = document.getElementById("found"), MOST = 60, ALL = 200000;
  const paths = () => {
    const rows = [];
    const walk = (kind, path) => {
      for (const [inner, box] of inside(kind, path)) {
        if (rows.length >= ALL) return;
        rows.push([inner, box[LABEL], box[PASSES].join(" ")]);
        if (box[INNER] !== null) walk(box[INNER], inner);
      }
    };
    walk(page.root, "");
    return rows;
  };
  const words = text => text.toLowerCase().split(/\s+/).filter(Boolean);
  field.addEventListener("input", () => {
    index ??= paths();
    const asked = words(field.value);
    found.hidden = !asked.length;
    if (found.hidden) return;
    const hits = index.filter(row => { const text = row.join(" ").toLowerCase(); return asked.every(word => text.includes(word)); });
    found.replaceChildren(...hits.slice(0, MOST).map(([path, label, passes]) => {
      const item = make("li"), to = make("a", path, { href: link(path) });
      item.append(to, " ", make("span", [label, passes].filter(Boolean).join(" · "), { class: "soft" }));
      return item;
    }));
    found.append(make("li", hits.length ? `${hits.length} found${hits.length > MOST ? `, ${MOST} shown` : ""}` : "nothing found", { class: "soft" }));
  });
  field.addEventListener("keydown", event => {
    if (event.key === "Escape") { field.value = ""; found.hidden = true; }
    if (event.key === "Enter") { const first = found.querySelector("a"); if (first) location.hash = first.getAttribute("href"); }
  });
}

const filter = document.getElementById("filter");
if (filter) {
  const rows = [...document.getElementById("rows").rows].map(row => [row, row.textContent.toLowerCase()]);
  filter.addEventListener("input", () => {
    const asked = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const [row, text] of rows) { row.hidden = !asked.every(word => text.includes(word)); count += !row.hidden; }
    document.getElementById("shown").textContent = `${count} of ${rows.length}`;
  });
}
const number = text => Number(text.replaceAll(",", ""));
document.querySelectorAll("table.sortable").forEach(table => table.querySelectorAll("th button").forEach((button, column) => button.addEventListener("click", () => {
  const head = button.parentElement, up = head.getAttribute("aria-sort") !== "ascending";
  table.querySelectorAll("th").forEach(each => each.setAttribute("aria-sort", "none"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const body = table.tBodies[0], rows = [...body.rows].map(row => [row.cells[column].textContent, row]);
  const order = new Intl.Collator("en", { numeric: true });
  rows.sort(([a], [b]) => (Number.isFinite(number(a)) && Number.isFinite(number(b)) ? number(a) - number(b) : order.compare(a, b)) * (up ? 1 : -1));
  body.append(...rows.map(([, row]) => row));
})));
})();
