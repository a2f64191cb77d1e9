import { API, Refused } from './api.js';
import { el, table, meter, seconds, time, percent, count } from './dom.js';

const $ = (id) => document.getElementById(id);
const most = 200; // decisions that are kept on the page
const views = { fleet: fleet, line: line, decisions: null, usage: usage, policies: policies };
let api = null;
let view = 'fleet';
let session = null; // aborts what the last token began
let watching = null;
let status = {};
let decided = []; // newest first
let chosen = '';

// --- views ---

function fleet() {
  const sets = new Map();
  for (const w of status.workers || []) sets.set(w.workerSet, [...(sets.get(w.workerSet) || []), w]);
  const parts = [];
  for (const [name, workers] of sets) {
    parts.push(el('h2', {}, name, ' ', el('span', { class: 'note' }, workers.filter((w) => w.ready).length + ' of ' + workers.length + ' ready')));
    parts.push(el('div', { class: 'grid' }, ...workers.map(worker)));
  }
  if (status.providers?.length) {
    parts.push(el('h2', {}, 'Providers'));
    parts.push(el('div', { class: 'grid' }, ...status.providers.map((p) => el('article', { class: 'card' },
      el('h3', {}, p.provider), el('p', {}, 'expected TTFT ' + time(p.predictedTtft)),
      el('dl', {}, ...entry('In flight', p.inFlight || 0), ...recent(p.recent))))));
  }
  if (!parts.length) parts.push(el('p', {}, 'No workers yet.'));
  $('fleet').replaceChildren(...parts);
}

function worker(w) {
  const load = w.load || {};
  const stale = !w.load || seconds(w.sampleAge) > 5;
  const state = !w.ready ? 'bad' : stale || (w.index && !w.index.live) ? 'warn' : 'good';
  const said = !w.ready ? 'not ready' + (w.reason ? ': ' + w.reason : '') : stale ? 'ready, load is not known' : w.index && !w.index.live ? 'ready, no cache events' : 'ready';
  return el('article', { class: 'card ' + state, 'data-worker': w.worker },
    el('h3', {}, w.worker), el('p', {}, said),
    el('dl', {},
      ...entry('Queue', count(load.waiting) + ' waiting', meter((load.waiting || 0) / 8, 'waiting')),
      ...entry('Running', count(load.running), meter((load.running || 0) / 64, 'running')),
      ...entry('KV cache', percent(load.kvUsage || 0, 1), meter(load.kvUsage, 'KV cache in use')),
      ...entry('In flight', count(w.inFlight)),
      ...(w.index ? entry('Blocks', count(w.index.blocks)) : []),
      ...recent(w.recent)));
}

function entry(name, value, bar) { return [el('dt', {}, name), bar || el('span'), el('dd', {}, value)]; }

function recent(r) {
  if (!r) return entry('Last 5 min', 'no requests');
  const hits = Number(r.cachedTokens || 0), tokens = Number(r.promptTokens || 0);
  return [...entry('Cache hits', percent(hits, tokens), meter(tokens ? hits / tokens : 0, 'cache hits', 1)), ...entry('TTFT', time(r.ttft)),
    ...(r.ttftError ? entry('Off by', time(r.ttftError)) : []), ...entry('Last 5 min', count(r.requests) + ' requests')];
}

function line() {
  const waiting = status.waiting || [];
  $('line').replaceChildren(
    el('h2', {}, count(status.queued) + ' requests wait in this router'),
    table('Classes', [
      { name: 'Class', of: (c) => c.qos },
      { name: 'Waiting', number: true, of: (c) => count(c.waiting) },
      { name: 'Oldest', number: true, of: (c) => time(c.oldest) },
    ], status.queue || []),
    el('h2', {}, 'First in line'),
    table('First in line', [
      { name: 'Request', of: (w) => w.requestId }, { name: 'Tenant', of: (w) => w.tenant || '–' }, { name: 'Model', of: (w) => w.model },
      { name: 'Class', of: (w) => w.qos }, { name: 'Waits', number: true, of: (w) => time(w.waited) },
      { name: 'For', of: (w) => w.worker || '–' }, { name: 'Still', number: true, of: (w) => time(w.predictedWait) }, { name: 'Why', of: (w) => w.why },
    ], waiting));
}

function decisions() {
  $('stream').replaceChildren(table('Decisions', [
    { name: 'Time', of: (d) => new Date(Number(d.decidedUnixNanos) / 1e6).toLocaleTimeString('en-GB') },
    { name: 'Model', of: (d) => d.model },
    { name: 'Tenant', of: (d) => d.tenant || '–' },
    { name: 'Did', of: (d) => d.verdict?.action || 'route' },
    { name: 'To', of: (d) => d.servedBy || d.chosen || d.verdict?.chosen || '–' },
    { name: 'TTFT', number: true, of: (d) => time(d.actualTtft) },
    { name: 'Cached', number: true, of: (d) => (d.actualCachedTokens === undefined ? '–' : percent(d.actualCachedTokens, d.actualPromptTokens)) },
    { name: 'Rule', of: (d) => d.verdict?.rule || '–' },
  ], decided, (d) => ({
    class: 'link', tabindex: 0, 'aria-selected': String(d.requestId === chosen), 'data-request': d.requestId,
    onclick: () => explain(d.requestId), onkeydown: (e) => { if (e.key === 'Enter') explain(d.requestId); },
  })));
}

async function explain(id) {
  chosen = id;
  decisions();
  const d = (await attempt(() => api.explain(id)))?.decision;
  if (!d || chosen !== id) return;
  const facts = [['Request', d.requestId], ['Reason', d.reason || '–'], ['Rule', d.verdict?.rule || 'none matched'],
    ['Prompt', count(d.request?.promptTokens) + ' tokens'], ['Class', d.request?.qos || '–'], ['Tags', (d.request?.tags || []).join(', ') || '–'],
    ['Waited', time(d.waited)], ['Because of', (d.held || []).join(', ') || '–'], ['TTFT', time(d.actualTtft)], ['Outcome', (d.outcome || 'under way').replace('OUTCOME_', '').toLowerCase()]];
  if (d.shadow) facts.push(['On dry run', d.shadow.action + (d.shadow.rule ? ' by ' + d.shadow.rule : '')]);
  const list = (d.candidates || []).filter((c) => !c.dropped), dropped = (d.candidates || []).filter((c) => c.dropped);
  $('explain').replaceChildren(
    el('h2', {}, 'Why'), table('Facts', [{ name: '', of: (f) => f[0] }, { name: '', of: (f) => f[1] }], facts),
    el('h2', {}, 'Candidates, best first'),
    table('Candidates', [
      { name: 'Endpoint', of: (c) => c.worker },
      { name: 'TTFT', number: true, of: (c) => time(c.predictedTtft) },
      { name: 'Wait', number: true, of: (c) => time(c.predictedWait) },
      { name: 'Prefill', number: true, of: (c) => time(c.predictedPrefill) },
      { name: 'Cached', number: true, of: (c) => count(c.cachedTokens) },
      { name: 'Score', number: true, of: (c) => (c.score ? c.score.toFixed(2) : '–') },
      { name: 'Hold', of: (c) => c.hold || '–' },
    ], list),
    ...(dropped.length ? [el('h2', {}, 'Left out'), table('Left out', [{ name: 'Endpoint', of: (c) => c.worker }, { name: 'Why', of: (c) => c.dropped }], dropped)] : []));
}

async function usage() {
  const to = new Date(), from = new Date(to - 24 * 3600e3);
  let why = '';
  const tell = (e) => { why = e.message; };
  const [used, kept] = await Promise.all([
    attempt(() => api.usage({ filter: { from: from.toISOString(), to: to.toISOString() }, groupBy: ['GROUP_TENANT', 'GROUP_MODEL'] }), tell),
    attempt(() => api.objectives(), tell)]);
  if (!used && !kept) { $('usage').replaceChildren(el('p', {}, 'There is no usage to show: ' + why)); return; }
  const rows = (used?.rows || []).slice(0, most);
  const alert = (o) => { const a = (o.alert || '').replace('ALERT_', '').toLowerCase().replace('_', ' '); return el('span', { class: a === 'page' ? 'bad' : a === 'ticket' ? 'warn' : a === 'none' ? 'good' : 'note' }, a || '–'); };
  $('usage').replaceChildren(
    el('h2', {}, 'Last 24 hours'),
    table('Usage', [
      { name: 'Tenant', of: (r) => r.tenant || '(open)' }, { name: 'Model', of: (r) => r.model },
      { name: 'Requests', number: true, of: (r) => count(r.sums?.requests) }, { name: 'Failed', number: true, of: (r) => count(r.sums?.failed) },
      { name: 'Input', number: true, of: (r) => count(r.sums?.input) },
      { name: 'of it cached', number: true, of: (r) => percent(Number(r.sums?.cachedInput || 0), Number(r.sums?.input || 0)) },
      { name: 'Output', number: true, of: (r) => count(r.sums?.output) },
      { name: 'GPU s', number: true, of: (r) => count(Math.round(r.sums?.gpuSeconds || 0)) },
      { name: 'Cost', number: true, of: (r) => (r.sums?.cost ? r.sums.cost + ' ' + (r.sums.currency || '') : '–') },
    ], rows),
    el('h2', {}, 'Objectives'),
    kept?.objectives?.length ? table('Objectives', [
      { name: 'Of', of: (o) => o.objective?.owner || '' }, { name: 'Objective', of: (o) => o.objective?.name || '' },
      { name: 'Requests', number: true, of: (o) => count(o.total) },
      { name: 'Kept', number: true, of: (o) => (o.attainment === undefined ? '–' : (100 * o.attainment).toFixed(2) + ' %') },
      { name: 'Budget left', number: true, of: (o) => (o.budgetLeft === undefined ? '–' : (100 * o.budgetLeft).toFixed(0) + ' %') },
      { name: 'Alert', of: alert },
    ], kept.objectives) : el('p', { class: 'note' }, 'None are declared.'));
}

async function policies() {
  const c = await attempt(() => api.catalog());
  if (!c) return;
  const wrong = (name) => (c.problems || []).filter((p) => (p.resource || '').endsWith(' ' + name));
  const state = (p) => {
    const broken = wrong(p.name).some((x) => x.error);
    return el('span', { class: broken ? 'bad' : p.dryRun ? 'warn' : 'good' }, broken ? 'broken: an older one holds' : p.dryRun ? 'dry run' : 'in force');
  };
  $('policies').replaceChildren(
    el('h2', {}, 'Policies, in the order in which they apply'),
    table('Policies', [
      { name: 'Policy', of: (p) => p.name }, { name: 'Status', of: state }, { name: 'Pools', of: (p) => (p.pools || []).join(', ') || 'all of its namespace' },
      { name: 'Rules', of: (p) => (p.rules || []).map((r) => r.name + ' (' + r.action + ')').join(', ') },
    ], c.policies || []),
    el('h2', {}, 'Pools'),
    table('Pools', [
      { name: 'Pool', of: (p) => p.name }, { name: 'Models', of: (p) => (p.models || []).join(', ') },
      { name: 'Workers ready', number: true, of: (p) => (p.readyWorkers || 0) + ' of ' + (p.workers || 0) },
      { name: 'Providers', of: (p) => (p.providers || []).join(', ') || '–' }, { name: 'Policies', of: (p) => (p.policies || []).join(', ') || '–' },
    ], c.pools || []),
    el('h2', {}, 'Problems'),
    c.problems?.length ? table('Problems', [
      { name: '', of: (p) => el('span', { class: p.error ? 'bad' : 'warn' }, p.error ? 'error' : 'warning') },
      { name: 'Resource', of: (p) => p.resource || p.file }, { name: 'Field', of: (p) => p.field || '–' }, { name: 'What', of: (p) => p.message },
    ], c.problems) : el('p', { class: 'note' }, 'None.'));
}

// --- what happens when ---

function summary() {
  const w = status.workers || [];
  $('summary').textContent = `catalog ${status.catalogVersion || '–'} · ${w.filter((x) => x.ready).length} of ${w.length} workers ready · ` +
    (status.trackerConnected ? 'index connected' : 'no index') + ` · ${count(status.queued)} waiting` + (status.open ? ' · open to everybody' : '');
}

async function attempt(fn, tell = (e) => { $('summary').textContent = e.message; }) {
  try {
    return await fn();
  } catch (e) {
    if (e instanceof Refused) leave(e.message);
    else if (e.name !== 'AbortError') tell(e);
    return null;
  }
}

async function tick(signal) {
  while (!signal.aborted) {
    const st = await attempt(() => api.status());
    if (signal.aborted) return;
    if (st) {
      status = st;
      summary();
      if (view === 'fleet' || view === 'line') views[view]();
    }
    await new Promise((done) => setTimeout(done, document.hidden ? 5000 : 1000));
  }
}

// watch follows decisions, again and again, from those that are kept.
async function watch() {
  watching?.abort();
  const mine = (watching = new AbortController());
  const form = new FormData($('filter'));
  let drawn = false;
  while (!mine.signal.aborted) {
    decided = [];
    await attempt(() => api.decisions({ model: form.get('model'), tenant: form.get('tenant'), recent: 50, finished: true }, mine.signal, (d) => {
      decided = [d, ...decided].slice(0, most);
      if (!drawn) { // once a frame, however many come
        drawn = true;
        requestAnimationFrame(() => { drawn = false; decisions(); });
      }
    }));
    if (!mine.signal.aborted) await new Promise((done) => setTimeout(done, 1000));
  }
}

function show(name) {
  view = name;
  for (const tab of document.querySelectorAll('[role=tab]')) {
    const on = tab.id === 'tab-' + name;
    tab.setAttribute('aria-selected', String(on));
    tab.tabIndex = on ? 0 : -1;
    $(tab.getAttribute('aria-controls')).hidden = !on;
  }
  if (name === 'decisions') watch();
  else watching?.abort();
  views[name]?.();
}

async function enter(token) {
  api = new API(token);
  try {
    status = await api.status();
  } catch (e) {
    leave(e.message);
    return;
  }
  sessionStorage.setItem('token', token);
  $('login').hidden = true;
  $('app').hidden = $('leave').hidden = false;
  session = new AbortController();
  summary();
  show(view);
  tick(session.signal);
}

function leave(why = '') {
  session?.abort();
  watching?.abort();
  sessionStorage.removeItem('token');
  status = {};
  decided = [];
  for (const name of Object.keys(views)) if (name !== 'decisions') $(name).replaceChildren();
  $('stream').replaceChildren();
  $('explain').replaceChildren();
  $('app').hidden = $('leave').hidden = true;
  $('login').hidden = false;
  $('summary').textContent = '';
  $('refused').textContent = why;
  $('token').value = '';
  $('token').focus();
}

$('login').querySelector('form').addEventListener('submit', (e) => { e.preventDefault(); enter($('token').value.trim()); });
$('filter').addEventListener('submit', (e) => { e.preventDefault(); watch(); });
$('leave').addEventListener('click', () => leave());
document.querySelector('[role=tablist]').addEventListener('click', (e) => { const tab = e.target.closest('[role=tab]'); if (tab) show(tab.getAttribute('aria-controls')); });
document.querySelector('[role=tablist]').addEventListener('keydown', (e) => {
  const names = Object.keys(views), at = names.indexOf(view);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1 }[e.key];
  if (to === undefined) return;
  show(names[(to + names.length) % names.length]);
  $('tab-' + view).focus();
});
setInterval(() => { if (session && !session.signal.aborted && !document.hidden && view === 'usage') usage(); }, 10000);

const kept = sessionStorage.getItem('token');
if (kept) enter(kept);
else leave();
