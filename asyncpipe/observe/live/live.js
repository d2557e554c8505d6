// A run: listens to its events and shows the newest state. Every message is a complete state, so a page may miss
// messages, and is up to date as soon as it has reconnected. Data goes into the page as text, never as markup.
// On the page of a job, job.js of the service shows the job around it.

import { Chart, spark } from './charts.js';
import { $, count, duration, fill, lossText, make, percent, short, size, whole, write as writeIn } from './text.js';
import { Timeline } from './timeline.js';

const timeline = new Timeline($('timeline'), $('story'));
export const curve = new Chart($('curve'), 260);
// What can be drawn over steps: its label, and its points from the newest state. The page of a job adds more.
export const figures = {
  loss: { label: 'Loss', points: ({ history }) => history.map(point => [point[0], point[1]]) },
  rate: { label: 'Tokens per second', points: ({ history }) => history.map(point => [point[0], point[3]]) },
  seconds: { label: 'Seconds per step', points: ({ history }) => history.map(point => [point[0], point[2]]) },
  bubble: { label: 'Bubble', points: ({ bubbles }) => bubbles },
};
let newest = { history: [], bubbles: [] };
const REASONS = {
  busy: 'busy', dependency: 'waits for data', edge: 'waits for data on its way', copy: 'waits for a copy',
  dispatch: 'waits for the scheduler', shared: 'is used by another job', drain: 'has finished the step',
};

const write = (id, text) => writeIn($(id), text);

// ---- Parts of the page

function showHead({ job, steps, training, step, spoiled }) {
  write('job', job || 'asyncpipe');
  document.title = `${job || 'run'} · asyncpipe`;
  const facts = step ? [
    step.schedule, count(step.stages.length, 'stage'), count(step.devices.length, 'device'),
    step.microbatches === 1 ? '1 micro-batch' : `${whole(step.microbatches)} micro-batches`,
  ] : [];
  const done = training?.steps ?? 0;
  if (done) facts.push(steps ? `step ${whole(done)} of ${whole(steps)}` : count(done, 'step'));
  write('about', facts.join(' · '));
  const progress = $('progress');
  progress.hidden = !steps;
  progress.setAttribute('aria-valuemax', steps ?? 0);
  progress.setAttribute('aria-valuenow', done);
  progress.firstElementChild.style.width = `${steps ? Math.min(done / steps, 1) * 100 : 0}%`;
  const counts = [spoiled.failed && `${spoiled.failed} failed`, spoiled.cancelled && `${spoiled.cancelled} cancelled`];
  write('notice', spoiled.last && `${spoiled.last} Since the run began: ${counts.filter(Boolean).join(', ')}.`);
  $('notice').hidden = !spoiled.last;
}

function showTiles({ training, step, history, bubbles }) {
  write('loss', training ? lossText(training.loss) : '–');
  write('rate-name', training?.unit === 'samples' ? 'Samples per second' : 'Tokens per second');
  write('rate', short(training?.rate));
  write('rate-below', training ? 'over the last 20 steps' : '');
  write('seconds', duration(training?.seconds ?? step?.seconds));
  write('seconds-below', training && step ? `pipeline: ${duration(step.seconds)}` : '');
  write('bubble', percent(step?.bubble));
  write('bubble-below', step && step.ideal !== null ? `ideal ${percent(step.ideal)}` : '');
  const column = index => history.map(point => [point[0], point[index]]);
  spark($('loss-spark'), column(1));
  spark($('seconds-spark'), column(2));
  spark($('rate-spark'), column(3));
  spark($('bubble-spark'), bubbles, step?.ideal);
}

function showTimeline({ timeline: data, step }) {
  const drawn = data !== null && data.tasks.length > 0;
  $('timeline-empty').hidden = drawn;
  $('timeline').toggleAttribute('hidden', !drawn);
  if (!data) return;
  const parts = { step: '', forward: ', forwards only', backward: ', backwards only' };
  write('timeline-about', `${duration(step.seconds)}, ${count(data.count, 'task')}${parts[step.phase]}`);
  legend($('kinds'), Object.entries(drawn ? data.kinds : {}).map(([kind, name]) => [data.colours[kind][0], name]));
  if (!drawn) {
    write('timeline-empty', data.count ? `${count(data.count, 'task')} are too many to draw here.` : 'No task ran.');
    return;
  }
  timeline.draw(data, step.devices);
  $('timeline').setAttribute('aria-label',
    `Timeline of the last step: ${count(data.rows.length, 'device')}, ${count(data.count, 'task')}. ` +
    'Arrow keys go from task to task.');
}

// `entries` are [colour, text].
function legend(list, entries) {
  fill(list, entries, () => entries.map(([colour, text]) => {
    const item = make('li', text);
    item.style.setProperty('--colour', colour);
    return item;
  }));
}

// A table row for each worker; without workers there is no table.
function showWorkers({ workers }) {
  $('workers').hidden = !workers;
  fill($('workers-rows'), workers, () => (workers ?? []).map(worker => {
    const row = make('tr'), sent = make('td'), state = worker.how ? `${worker.state}: ${worker.how}` : worker.state;
    sent.append(...worker.sent.map(({ to, messages, bytes, waited }) => {
      const blocked = waited > 0 ? `, ${duration(waited)} without credit` : '';
      return make('div', `→ ${to}: ${size(bytes)} in ${count(messages, 'message')}${blocked}`);
    }));
    row.append(
      make('td', worker.name), make('td', state, { 'data-state': worker.state }), make('td', worker.pid),
      make('td', worker.devices.join(', ')), make('td', size(worker.resident)), make('td', duration(worker.round_trip)), sent,
    );
    return row;
  }));
}

function showStages({ step, workers }) {
  const list = $('stages'), stages = step?.stages ?? [];
  while (list.children.length > stages.length) list.lastElementChild.remove();
  while (list.children.length < stages.length) list.append(stageRow(list.children.length));
  // On threads nothing is on its way.
  const told = reasons => Object.entries(reasons).filter(([reason]) => workers || reason !== 'edge');
  stages.forEach((stage, index) => {
    const row = list.children[index], bar = row.querySelector('.bar'), shares = { busy: stage.busy, ...stage.idle };
    const texts = told(shares).map(([reason, share]) => `${REASONS[reason]} ${percent(share)}`);
    if (stage.in_flight !== null) texts.push(`${stage.in_flight} in flight at most`);
    writeIn(row.querySelector('small'), stage.device);
    writeIn(row.querySelector('.share'), percent(stage.busy));
    for (const part of bar.children) part.style.width = `${(shares[part.dataset.reason] ?? 0) * 100}%`;
    bar.title = texts.join('\n');
    bar.setAttribute('aria-label', `Stage ${index} on ${stage.device}: ${texts.join(', ')}`);
  });
  write('finding', step ? finding(step) : '');
  if (!step) return;
  const named = told(REASONS).filter(([reason]) => reason === 'busy' || reason in stages[0].idle);
  const other = stages.length > step.devices.length ? [['var(--track)', 'its device runs another stage']] : [];
  legend($('reasons'), [...named.map(([reason, name]) => [`var(--${reason})`, name]), ...other]);
}

function stageRow(index) {
  const row = make('li'), who = make('span', `Stage ${index}`, { class: 'who' }), bar = make('span', '', { class: 'bar', role: 'img' });
  who.append(make('small'));
  for (const reason of Object.keys(REASONS)) {
    const part = bar.appendChild(make('i', '', { 'data-reason': reason }));
    part.style.setProperty('--colour', `var(--${reason})`);
  }
  row.append(who, bar, make('span', '', { class: 'share' }));
  return row;
}

// A sentence that names the busiest stage and what the devices mostly wait for.
function finding({ stages, devices }) {
  const busiest = stages.reduce((best, stage, index) => stage.busy > stages[best].busy ? index : best, 0);
  const sums = Object.keys(REASONS).filter(reason => reason !== 'busy').map(
    reason => [reason, stages.reduce((sum, stage) => sum + (stage.idle[reason] ?? 0), 0) / devices.length]);
  const [reason, share] = sums.reduce((best, one) => one[1] > best[1] ? one : best);
  const first = stages.length > 1 ? `Stage ${busiest} is the busiest. ` : '';
  return share > 0.005 ? `${first}An idle device mostly ${REASONS[reason]} (${percent(share)} of all device time).` : first;
}

export function showCurve() {
  fill($('curve-figure'), Object.keys(figures), () => Object.entries(figures).map(([value, { label }]) => make('option', label, { value })));
  const { label, points } = figures[$('curve-figure').value], drawn = points(newest), there = drawn.some(([, value]) => value !== null);
  $('curve-empty').hidden = there;
  $('curve').hidden = !there;
  write('curve-title', `${label} over steps`);
  $('curve').setAttribute('aria-label', `${label} over steps. Arrow keys go from step to step.`);
  if (there) curve.draw([{ name: label.toLowerCase(), points: drawn }]);
}

function show(state) {
  showHead(state);
  showTiles(state);
  showTimeline(state);
  showStages(state);
  showWorkers(state);
  newest = state;
  showCurve();
}

$('curve-figure').addEventListener('change', showCurve);
$('curve-log').addEventListener('change', event => { curve.log = event.target.checked; curve.redraw(); });

// ---- The connection

const PAUSES = [1, 2, 4, 8, 15];
let failures = 0;

function connection(name, text = name) {
  $('connection').dataset.state = name;
  write('connection-text', text);
}

function connect() {
  const source = new EventSource('events');
  let ended = false;
  source.addEventListener('state', event => {
    failures = 0;
    show(JSON.parse(event.data));
    connection('live');
  });
  source.addEventListener('end', event => {
    show(JSON.parse(event.data));
    ended = true;
    connection('ended', document.body.dataset.ended ?? 'run ended');
    again();
  });
  source.addEventListener('error', () => {
    if (!ended) connection('reconnecting');
    // Browsers reconnect by themselves after a lost connection, and some also after a refused one, but not all.
    if (source.readyState === EventSource.CLOSED) again();
  });
  // After the end of a run the page keeps showing it, and follows if the same program runs again.
  function again() {
    source.close();
    setTimeout(connect, PAUSES[Math.min(failures++, PAUSES.length - 1)] * 1000);
  }
}

connect();
