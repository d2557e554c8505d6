// The jobs of a service: asks the API every two seconds, and shows what it says. Data goes into the page as text, never as
// markup. The ideas: filters.js (which jobs), list.js (their rows), actions.js (what can be done), compare.js (losses over
// the same axes), workers.js.

import { agreed, carryOut, complain, possible, showButtons } from './actions.js';
import { address, ask, turns } from './api.js';
import * as compare from './compare.js';
import * as filters from './filters.js';
import * as list from './list.js';
import { $, count, whole, write } from './text.js';
import * as workers from './workers.js';

const SECONDS = 2;
let last = null;        // what was asked for the last time, and the number of the newest transition then
let counts = {};        // jobs by state
let entries = null;     // names of the entries

// ---- Turns

// If no job has changed its state since, only those that run have something new to tell.
async function refresh() {
  entries ??= (await ask('v1/entries')).entries.map(entry => entry.name);
  const now = await ask('v1/counts'), wanted = filters.wanted();
  counts = now.states;
  const asked = `${now.sequence} ${location.search}`;
  for (const section of wanted) {
    if (asked !== last || !section.states || section.states.includes('running')) await list.load(section);
  }
  last = asked;
  workers.show((await ask('v1/workers')).workers);
  show();
  await list.loadCurves();
  await compare.refresh();
}

function show() {
  const all = filters.showCounts(counts), some = list.show(filters.wanted(), { ...counts, narrowed: filters.isNarrowed() });
  $('filters').hidden = !all;
  $('empty').hidden = all > 0;
  $('nothing').hidden = !all || some;
  write($('about'), [['running', 'running'], ['queued', 'waiting'], ['failed', 'failed']]
    .filter(([state]) => counts[state]).map(([state, word]) => `${whole(counts[state])} ${word}`).join(' · '));
  document.title = counts.failed ? `${counts.failed} failed · Jobs · asyncpipe` : 'Jobs · asyncpipe';
  filters.showEntries(entries ?? []);
  if (!all) showCommand();
  showChosen();
}

function connection(state, text, problem) {
  $('connection').dataset.state = state;
  write($('connection-text'), text);
  if (problem) complain(problem);
}

const turn = turns(refresh, SECONDS, connection);

// ---- Acting

async function act(what, ids) {
  if (what === 'compare') return compare.open(ids).catch(error => complain(error.message));
  const able = ids.filter(id => list.jobs.has(id) && possible(list.jobs.get(id)).includes(what));
  const which = able.length === 1 ? `“${list.jobs.get(able[0]).name}”` : count(able.length, 'job');
  if (!able.length || !await agreed(what, which)) return;
  const problems = [];
  for (const id of able) {
    try {
      const job = await carryOut(what, id);
      if (job) list.keep(job); else list.jobs.delete(id);
      list.picked.delete(id);
    } catch (error) {
      problems.push(error.message);
    }
  }
  complain([...new Set(problems)].join(' '));
  write($('said'), problems.length ? '' : `${what}: ${which}`);
  last = null;
  show();
  turn();
}

// The bar for the jobs whose boxes are ticked: what can be done to at least one of them.
function showChosen() {
  const ids = [...list.picked].filter(id => list.jobs.has(id)), bar = $('chosen');
  bar.hidden = !ids.length;
  if (!ids.length) return;
  write($('chosen-text'), `${count(ids.length, 'job')} chosen`);
  const acts = [...new Set(ids.flatMap(id => possible(list.jobs.get(id))))];
  showButtons($('chosen-acts'), acts, 'the chosen jobs', what => act(what, [...list.picked]));
}

$('chosen-compare').addEventListener('click', () => act('compare', [...list.picked]));
$('chosen-clear').addEventListener('click', () => { list.picked.clear(); show(); $('title').focus(); });
$('dismiss').addEventListener('click', () => { complain(''); $('title').focus(); });

// ---- An empty service

function showCommand() {
  const url = address('.').replace(/\/$/, '');
  write($('command'), `asyncpipe jobs submit examples/charlm/charlm.toml --url ${url}`);
  const known = (entries ?? []).includes('charlm:build');
  write($('empty-entries'), known || !entries ? '' : `This service trains ${entries.join(', ') || 'nothing'}; for the example, start it ` +
    'with --entries charlm:build --entry-path examples/charlm.');
}

$('copy').addEventListener('click', async () => {
  const text = $('command').textContent;
  try {
    await navigator.clipboard.writeText(text);
    write($('copied'), 'Copied.');
  } catch {  // Browsers allow it on secure pages only: then it is ready to be copied by key.
    getSelection().selectAllChildren($('command'));
    write($('copied'), 'Press Ctrl-C to copy.');
  }
});

workers.begin(turn);
list.begin({ act, changed: asked => { if (asked) { filters.show(); turn(); } else show(); } });
filters.begin(turn);
addEventListener('resize', show);
turn();
