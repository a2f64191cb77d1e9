// Building blocks. Text from outside only ever becomes a text node.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, '');
    else if (value !== undefined && value !== null && value !== false) node.setAttribute(key, value);
  }
  node.append(...children.map((c) => (c instanceof Node ? c : document.createTextNode(String(c ?? '')))));
  return node;
}

// table makes one of columns {name, of(row), number}; rows may be links.
export function table(caption, columns, rows, link) {
  const head = el('tr', {}, ...columns.map((c) => el('th', { scope: 'col', class: c.number && 'number' }, c.name)));
  const body = rows.map((row) => el('tr', link ? link(row) : {}, ...columns.map((c) => el('td', { class: c.number && 'number' }, c.of(row)))));
  return el('table', { 'aria-label': caption }, el('thead', {}, head), el('tbody', {}, ...body));
}

export function meter(value, text, high = 0.85) {
  return el('meter', { min: 0, max: 1, high, value: Math.min(1, Math.max(0, value || 0)), 'aria-label': text });
}

// seconds reads a duration of protobuf's JSON; undefined if there is none.
export function seconds(duration) { return duration === undefined ? undefined : parseFloat(duration); }

export function time(duration) {
  const s = seconds(duration);
  if (s === undefined || Number.isNaN(s)) return '–';
  return s < 1 ? Math.round(s * 1000) + ' ms' : s.toFixed(2) + ' s';
}

export function percent(part, whole) { return whole > 0 ? Math.round((100 * part) / whole) + ' %' : '–'; }

export function count(n) { return Number(n || 0).toLocaleString('en'); }
