/* figures.js - elements, tables and figures of the page, and the names of its rows. page.js, which
 * follows this file in the same scope, owns the page's sections.
 *
 * Every figure is an SVG with a name, and a table below it has the same numbers. The page loads
 * nothing, and no part of it needs a mouse. In a build without the plotting library the page has
 * only the tables. */
const data = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("content");
const about = data.about ?? {};
const steps = data.steps ?? [];
const MIB = 1048576;
const COLOURS = [1, 2, 3, 4, 5, 6, 7, 8, 9].map((i) => `var(--c${i})`);
const DASHES = ["6 3", "2 2", "8 3 2 3", "1 3", "10 4", "4 2 1 2", "3 6"];

/* Elements, always from text and never from markup: names come from files. */
function complete(made, attributes, children) {
    for (const [key, value] of Object.entries(attributes))
        if (value !== null && value !== undefined) made.setAttribute(key, value);
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
}
const element = (name, attributes = {}, ...children) =>
    complete(document.createElement(name), attributes, children);
const svgElement = (name, attributes, ...children) =>
    complete(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const show = (value, digits = 2) => (isNumber(value) ? value.toFixed(digits) : value ?? "–");
/* Three significant digits where zeros would be all that is left. */
const per100 = (value) => (isNumber(value) ? (100 * value).toFixed(1) : "–");
const mib = (value) => (isNumber(value) ? (value / MIB).toFixed(2) : "–");
const integer = (value) => show(value, 0);
const NAMES = { key: "name", name: "keys / values", text: true };
const showSmall = (value) =>
    !isNumber(value) ? "–" : Math.abs(value) < 1e-5 ? "0"
        : Math.abs(value) < 0.1 ? value.toPrecision(3) : value.toFixed(3);
const unique = (values) => [...new Set(values)];

/* Rows of a step, or of all steps whose names begin with this name ("needle:512",
 * "needle:1024"). */
const rowsOf = (name) =>
    steps.filter((step) => step.name === name || step.name.startsWith(`${name}:`))
        .flatMap((step) => step.rows ?? []);

function labelOf(row) {
    const specs = row.k === row.v ? row.k : `${row.k} / ${row.v}`;
    const name = row.preset ? `preset ${row.preset}` : row.config ? `settings ${row.config}`
        : specs;
    const prefix = row.cache === "llama.cpp" ? "llama.cpp " : row.cache === "accel" ? "accel "
        : row.cache === "kvant fp32" ? "fp32 " : "";
    const suffix = row.protect > 0 ? `, protect ${row.protect}` : "";
    return prefix + name + suffix;
}

const isF16 = (row) => row.cache === "llama.cpp" && row.k === "f16" && row.v === "f16";
const kindOf = (row) =>
    row.cache === "llama.cpp" || row.cache === "accel" ? "llama.cpp" : row.preset ? "preset"
        : row.config ? "settings file" : "kvant codec";
const KINDS = ["kvant codec", "preset", "settings file", "llama.cpp"];
const SYMBOLS = ["circle", "star", "diamond", "square"];

/* A table: columns are { key, name, text (left), show }. Headings are buttons, so the keyboard
 * sorts as well as the mouse. */
function makeTable(caption, columns, rows, sortable = true) {
    const body = element("tbody");
    const fill = (sorted) =>
        body.replaceChildren(
            ...sorted.map((row) =>
                element("tr", {}, ...columns.map((column, i) =>
                    element(i === 0 ? "th" : "td", { class: column.text ? "text" : null,
                        scope: i === 0 ? "row" : null, "data-name": i === 0 ? null : column.name },
                        String((column.show ?? show)(row[column.key]))))),
            ),
        );
    const headings = columns.map((column) => {
        const heading = element("th", { scope: "col", class: column.text ? "text" : null });
        if (!sortable) {
            heading.append(column.name);
            return heading;
        }
        const button = element("button", { type: "button" }, column.name);
        button.addEventListener("click", () => sortBy(column, heading));
        heading.append(button);
        return heading;
    });
    function sortBy(column, heading) {
        const up = heading.getAttribute("aria-sort") !== "ascending";
        headings.forEach((other) => other.removeAttribute("aria-sort"));
        heading.setAttribute("aria-sort", up ? "ascending" : "descending");
        const order = (a, b) => {
            const [x, y] = [a[column.key], b[column.key]];
            if (x === null || x === undefined || y === null || y === undefined)
                return (x ?? null) === null ? ((y ?? null) === null ? 0 : 1) : -1;
            const step = isNumber(x) && isNumber(y) ? x - y
                : String(x).localeCompare(String(y), "en", { numeric: true });
            return up ? step : -step;
        };
        fill([...rows].sort(order));
    }
    fill(rows);
    return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
        element("table", {}, element("caption", {}, caption),
            element("thead", {}, element("tr", {}, ...headings)), body));
}

function section(id, title, ...children) {
    const made = element("section", { id, "aria-labelledby": `${id}-title` },
        element("h2", { id: `${id}-title` }, title), ...children);
    main.append(made);
    return made;
}

const notMeasured = (what) => element("p", { class: "note" }, `Not measured: ${what}`);

/* Figures are drawn again when their width changes. draw(width) returns an SVG. */
function figure(label, draw, legend, table) {
    const place = element("div");
    const holder = element("figure", { role: "group", "aria-label": label }, place, legend ?? null,
        element("details", {}, element("summary", {}, "The numbers of this figure"), table));
    if (!window.Plot) {
        place.append(element("p", { class: "note" },
            "This build of kvant has no plotting library: the numbers are in the table."));
        holder.querySelector("details").open = true;
        return holder;
    }
    follow(place, label, draw);
    return holder;
}

/* Draws into an element whenever its width changes. */
function follow(place, label, draw) {
    let drawn = 0;
    new ResizeObserver(() => {
        const width = Math.round(place.clientWidth);
        if (width === drawn || width < 40) return;
        drawn = width;
        const svg = draw(width);
        svg.setAttribute("role", "img");
        svg.setAttribute("aria-label", label);
        place.replaceChildren(svg);
    }).observe(place);
}

const STYLE = { fontSize: "12px", background: "none", color: "var(--ink)", fontFamily: "inherit" };
const plot = (options) => Plot.plot({ style: STYLE, ...options });

/* A cache looks the same in every figure. f16 is a solid line in the colour of ink. Seven dashes
 * and nine colours have no common divisor, so 63 further caches all look different, and the first
 * nine have different colours. */
const palette = unique([...rowsOf("needle"), ...rowsOf("speed"), ...rowsOf("position")]
    .filter((row) => !isF16(row)).map(labelOf));
function lookOf(name, names) {
    if (name === labelOf({ cache: "llama.cpp", k: "f16", v: "f16" }))
        return { colour: "var(--ink)", dash: null };
    const i = palette.includes(name) ? palette.indexOf(name) : palette.length + names.indexOf(name);
    return { colour: COLOURS[i % COLOURS.length], dash: DASHES[i % DASHES.length] };
}

function lineLegend(names) {
    return element("ul", { class: "legend" }, ...names.map((name) => {
        const look = lookOf(name, names);
        const line = svgElement("line", { x1: 1, x2: 25, y1: 7, y2: 7, "stroke-width": 2.5,
            "stroke-dasharray": look.dash });
        line.style.stroke = look.colour;
        const key = svgElement("svg", { "aria-hidden": "true", viewBox: "0 0 26 14" }, line);
        return element("li", {}, key, name);
    }));
}

/* Lines that colour and dashes tell apart. rows: { x, y, name }. */
function lineMarks(rows, names) {
    return names.flatMap((name) => {
        const { colour, dash } = lookOf(name, names);
        const own = rows.filter((row) => row.name === name && isNumber(row.y))
            .sort((a, b) => a.x - b.x);
        const look = { x: "x", y: "y", stroke: colour };
        return [
            Plot.line(own, { ...look, strokeWidth: 2, strokeDasharray: dash ?? undefined }),
            Plot.dot(own, { ...look, fill: "var(--paper)", r: 2.5,
                title: (d) => `${name}: ${showSmall(d.y)}` }),
        ];
    });
}

/* Names at the ends of lines, moved apart; a phone has no room for them and has the legend. */
function endLabels(svg, rows, names) {
    const [x, y] = [svg.scale("x"), svg.scale("y")];
    const ends = names.map((name) => rows.filter((row) => row.name === name && isNumber(row.y))
        .sort((a, b) => b.x - a.x)[0]).filter(Boolean)
        .map((row) => ({ name: row.name, x: x.apply(row.x), y: y.apply(row.y) }))
            .sort((a, b) => a.y - b.y);
    ends.forEach((end, i) => { if (i > 0) end.y = Math.max(end.y, ends[i - 1].y + 13); });
    const beyond = ends.length > 0 ? Math.max(0, ends[ends.length - 1].y - y.range[0]) : 0;
    for (const end of ends) {
        const text = svgElement("text", { x: end.x + 8, y: end.y - beyond, dy: "0.32em",
            "font-size": 11, "text-anchor": "start", class: "end" },
        end.name.replace(/^(llama\.cpp|preset|settings) /, "").slice(0, 24));
        text.style.fill = lookOf(end.name, names).colour;
        svg.append(text);
    }
    return svg;
}

/* Names of presets and of llama.cpp's types stand next to their points: at the first place that is
 * free of names, points and edges, or else at the place that covers least. The width of a letter is
 * taken as 0.62 of the text's size. */
const overlap = (a, b) =>
    Math.max(0, Math.min(a.right, b.right) - Math.max(a.left, b.left)) *
    Math.max(0, Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top));
const box = (left, top, width, height) =>
    ({ left, top, right: left + width, bottom: top + height });

/* Right of the point, left of it, above and below, and a line further. */
function placesAround(p, width, height) {
    const [above, level] = [-height - 3, -height / 2];
    const places = [[8, above], [9, level], [8, 4], [-width - 8, above], [-width - 9, level],
        [-width / 2, -height - 8], [-width / 2, 8], [10, -2 * height - 3], [10, height + 4]];
    return places.map(([dx, dy]) => box(p.x + dx, p.y + dy, width, height));
}

function pointLabels(svg, shown, best, size) {
    const [x, y] = [svg.scale("x"), svg.scale("y")];
    const at = (row) => ({ x: x.apply(row[size]), y: y.apply(row.kld_mean) });
    const points = shown.map(at).map((p) => box(p.x - 6, p.y - 6, 12, 12));
    const numbers = best.map(at).map((p) => box(p.x - 22, p.y + 2, 16, 14));
    const taken = [...points, ...numbers];
    const paper = box(x.range[0], y.range[1] - 22, svg.getAttribute("width") - x.range[0],
        y.range[0] - y.range[1] + 22);
    const named = [...shown.filter((row) => row.preset), ...shown.filter(isStock)];
    for (const row of named) {
        const name = row.preset ?? row.name.replace("llama.cpp ", "");
        const [fontSize, weight] = row.preset ? [12, 600] : [11, 400];
        const width = 0.62 * fontSize * name.length, height = fontSize + 2;
        const hidden = (place) => width * height - overlap(place, paper);
        const covered = (place) =>
            taken.reduce((sum, other) => sum + overlap(place, other), 4 * hidden(place));
        const place = placesAround(at(row), width, height)
            .reduce((least, other) => (covered(other) < covered(least) - 0.5 ? other : least));
        taken.push(place);
        svg.append(pointLabel(name, place.left, place.top + height / 2, fontSize, weight));
    }
    return svg;
}

function pointLabel(name, x, y, size, weight) {
    return svgElement("text", { x, y, dy: "0.32em", "text-anchor": "start", class: "point",
        fill: "var(--ink)", stroke: "var(--paper)", "stroke-width": 3, "paint-order": "stroke",
        "font-size": size, "font-weight": weight }, name);
}

function lineFigure(label, rows, axes, columns) {
    const names = unique(rows.map((row) => row.name));
    const draw = (width) => {
        const wide = width >= 640;
        const svg = plot({
            width,
            height: Math.min(380, Math.max(240, width * 0.5)),
            marginLeft: 56,
            marginRight: wide ? 150 : 20,
            marginBottom: 40,
            x: { grid: false, ...axes.x },
            y: { grid: true, ...axes.y },
            marks: [Plot.ruleY(axes.zero ? [0] : []), ...lineMarks(rows, names)],
        });
        return wide ? endLabels(svg, rows, names) : svg;
    };
    return figure(label, draw, lineLegend(names), makeTable(label, columns, rows));
}
