// What the runs of a job said: the last lines of one of them, and what it says from then on. Lines are text, never markup.

import { address, ask } from './api.js';
import { $, count, fill, make, write } from './text.js';

const TAIL = 1000, MOST = 5000, BAD = ['stderr', 'traceback', 'warning', 'error', 'critical'];
const STREAMS = ['stdout', 'stderr', 'traceback', 'service', 'debug', 'info', 'warning', 'error', 'critical'];
const box = $('log'), time = at => new Date(at * 1000).toLocaleTimeString('en-GB');
let job = '', next = 0, source = null, turn = 0;

const query = more => new URLSearchParams(Object.entries({ run: $('log-run').value, stream: $('log-stream').value, ...more }).filter(([, value]) => value));
const follows = () => $('log-follow').getAttribute('aria-pressed') === 'true';

// Begins anew with the last lines of what is chosen.
async function load() {
  const own = ++turn;
  stop();
  const page = await ask(`v1/jobs/${job}/logs?${query({ tail: TAIL })}`).catch(() => null);
  if (own !== turn || !page) return;
  $('said-section').hidden = false;
  fill($('log-run'), page.runs, () => [make('option', 'the last run', { value: '' }), ...page.runs.toReversed().map(run => make('option', `run ${run}`, { value: run }))]);
  box.replaceChildren();
  next = page.next;
  add(page);
  follow();
}

function add({ run, lines }) {
  const bottom = follows();
  box.append(...lines.map(({ at, stream, text }) => {
    const line = make('p', '', { 'data-stream': BAD.includes(stream) ? 'bad' : stream, title: `run ${run}, ${stream}` });
    line.append(make('span', `${time(at)} `, { class: 'faint' }), text);
    return line;
  }));
  while (box.children.length > MOST) box.firstChild.remove();
  search();
  if (bottom) box.scrollTop = box.scrollHeight;
}

function search() {
  const wanted = $('log-text').value.trim().toLowerCase();
  let found = 0;
  for (const line of box.children) {
    line.hidden = wanted !== '' && !line.textContent.toLowerCase().includes(wanted);
    found += !line.hidden;
  }
  write($('log-about'), box.children.length ? wanted ? `${count(found, 'line')} of ${box.children.length} match` : '' : 'Nothing was said yet.');
}

function stop() {
  source?.close();
  source = null;
}

// A page that is not seen leaves its place among the server's connections to others.
function follow() {
  stop();
  if (!follows() || document.hidden || !job) return;
  source = new EventSource(address(`v1/jobs/${job}/logs/events?${query({ after: next })}`));
  source.addEventListener('said', event => {
    const { data } = JSON.parse(event.data);
    next = data.next;
    add(data);
  });
  source.addEventListener('end', stop);
}

// Shows the log of the job `id`; called whenever a run of it has begun or ended.
export function show(id) {
  job = id;
  load();
}

// The traceback of its last failure, if it is kept.
export async function traceback(id) {
  const page = await ask(`v1/jobs/${id}/logs?stream=traceback&tail=${TAIL}`).catch(() => ({ lines: [] }));
  return page.lines.map(({ text }) => text).join('\n');
}

$('log-stream').append(make('option', 'all', { value: '' }), ...STREAMS.map(stream => make('option', stream)));
for (const name of ['log-run', 'log-stream']) $(name).addEventListener('change', load);
$('log-text').addEventListener('input', search);
$('log-follow').addEventListener('click', () => {
  $('log-follow').setAttribute('aria-pressed', !follows());
  if (follows()) box.scrollTop = box.scrollHeight;
  follow();
});
document.addEventListener('visibilitychange', follow);
