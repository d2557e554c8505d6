// The live view: listens to the run's events and shows the newest state. Every message is a complete state, so a page
// may miss messages, and is up to date as soon as it has reconnected. Data goes into the page as text, never as markup.

import { Chart, readable, spark, teller } from './charts.js';
import { $, count, duration, lossText, percent, short, size, write as writeIn } from './text.js';
import { Timeline } from './timeline.js';

const timeline = new Timeline($('timeline')), curve = new Chart($('curve'), { height: 260 }), say = teller($('tip'));
const REASONS = {
  busy: 'busy', dependency: 'waits for data', edge: 'waits for data on its way', copy: 'waits for a copy',
  dispatch: 'waits for the scheduler', shared: 'is used by another job', drain: 'has finished the step',
};
let state = null, heard = 0;

const write = (id, text) => writeIn($(id), text);

// ---- Parts of the page

function showHead({ job, steps, training, step, spoiled }) {
  write('job', job || 'asyncpipe');
  document.title = `${job || 'run'} · asyncpipe`;
  const facts = step ? [
    step.schedule, count(step.stages.length, 'stage'), count(step.devices.length, 'device'),
    count(step.microbatches, 'micro-batch').replace(/chs$/, 'ches'),
  ] : [];
  const done = training?.steps ?? 0;
  if (done) facts.push(steps ? `step ${done.toLocaleString('en')} of ${steps.toLocaleString('en')}` : count(done, 'step'));
  write('about', facts.join(' · '));
  const progress = $('progress');
  progress.hidden = !steps;
  if (steps) {
    progress.setAttribute('aria-valuemax', steps);
    progress.setAttribute('aria-valuenow', done);
    progress.firstElementChild.style.width = `${Math.min(done / steps, 1) * 100}%`;
  }
  showSpoiled(spoiled);
}

function showSpoiled({ failed, cancelled, last }) {
  const counts = [failed && `${failed} failed`, cancelled && `${cancelled} cancelled`].filter(Boolean);
  write('notice', last && `${last} Since the run began: ${counts.join(', ')}.`);
  $('notice').hidden = !last;
}

function showTiles({ training, step, history, bubbles }) {
  write('loss', training ? lossText(training.loss) : '–');
  write('loss-below', training ? lossTrend(history) : '');
  const unit = training?.unit ?? 'tokens';
  write('rate-name', unit === 'tokens' ? 'Tokens per second' : 'Samples per second');
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
  spark($('bubble-spark'), bubbles, { goal: step?.ideal ?? null });
}

// How much the loss has changed over about the last tenth of the run.
function lossTrend(history) {
  const there = history.filter(point => point[1] !== null);
  if (there.length < 10) return '';
  const before = there.at(-Math.ceil(there.length / 10) - 1), change = there.at(-1)[1] - before[1];
  const sign = change > 0 ? '+' : change < 0 ? '−' : '±';
  return `${sign}${short(Math.abs(change))} in ${count(Math.round(there.at(-1)[0] - before[0]), 'step')}`;
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
  const shown = entries.flat().join();
  if (list.dataset.shown === shown) return;
  list.dataset.shown = shown;
  list.replaceChildren(...entries.map(([colour, text]) => {
    const item = document.createElement('li');
    item.style.setProperty('--colour', colour);
    item.textContent = text;
    return item;
  }));
}

// A table row for each worker; without workers there is no table.
function showWorkers({ workers }) {
  $('workers').hidden = !workers;
  const shown = JSON.stringify(workers), list = $('workers-rows');
  if (!workers || list.dataset.shown === shown) return;
  list.dataset.shown = shown;
  list.replaceChildren(...workers.map(worker => {
    const row = document.createElement('tr'), sent = document.createElement('td');
    const cells = [worker.name, worker.state, worker.pid, worker.devices.join(', '), size(worker.resident),
      duration(worker.round_trip)];
    row.append(...cells.map(text => {
      const cell = document.createElement('td');
      cell.textContent = text;
      return cell;
    }), sent);
    row.children[1].dataset.state = worker.state;
    if (worker.how) row.children[1].append(`: ${worker.how}`);
    sent.append(...worker.sent.map(({ to, messages, bytes, waited }) => {
      const line = document.createElement('div');
      const blocked = waited > 0 ? `, ${duration(waited)} without credit` : '';
      line.textContent = `→ ${to}: ${size(bytes)} in ${count(messages, 'message')}${blocked}`;
      return line;
    }));
    return row;
  }));
}

function showStages({ step, workers }) {
  const list = $('stages'), stages = step?.stages ?? [];
  while (list.children.length > stages.length) list.lastElementChild.remove();
  while (list.children.length < stages.length) list.append(stageRow(list.children.length));
  stages.forEach((stage, index) => {
    const row = list.children[index], shares = { busy: stage.busy, ...stage.idle };
    row.querySelector('small').textContent = stage.device;
    row.querySelector('.share').textContent = percent(stage.busy);
    for (const part of row.querySelectorAll('i')) part.style.width = `${(shares[part.dataset.reason] ?? 0) * 100}%`;
    row.querySelector('.bar').title = [
      ...told(shares, workers).map(([reason, share]) => `${REASONS[reason]}: ${percent(share)}`),
      ...(stage.in_flight === null ? [] : [`${stage.in_flight} in flight at most`]),
    ].join('\n');
    row.querySelector('.bar').setAttribute('aria-label', `Stage ${index} on ${stage.device}: ` +
      told(shares, workers).map(([reason, share]) => `${REASONS[reason]} ${percent(share)}`).join(', '));
  });
  write('finding', step ? finding(step) : '');
  if (!step) return;
  const other = stages.length > step.devices.length ? [['var(--track)', 'its device runs another stage']] : [];
  const named = told(REASONS, workers).filter(([reason]) => reason === 'busy' || reason in stages[0].idle);
  legend($('reasons'), [...named.map(([reason, name]) => [`var(--${reason})`, name]), ...other]);
}

// Entries by reason; on threads nothing is on its way.
const told = (reasons, workers) => Object.entries(reasons).filter(([reason]) => workers || reason !== 'edge');

function stageRow(index) {
  const row = document.createElement('li'), who = document.createElement('span'), bar = document.createElement('span');
  who.className = 'who';
  who.append(`Stage ${index}`, document.createElement('small'));
  bar.className = 'bar';
  bar.setAttribute('role', 'img');
  bar.append(...Object.keys(REASONS).map(reason => {
    const part = document.createElement('i');
    part.dataset.reason = reason;
    part.style.setProperty('--colour', `var(--${reason})`);
    return part;
  }));
  const share = document.createElement('span');
  share.className = 'share';
  row.append(who, bar, share);
  return row;
}

// A sentence that names the busiest stage and what the devices mostly wait for.
function finding({ stages, devices }) {
  const busiest = stages.reduce((best, stage, index) => stage.busy > stages[best].busy ? index : best, 0);
  const sums = Object.keys(REASONS).filter(reason => reason !== 'busy').map(
    reason => [reason, stages.reduce((sum, stage) => sum + (stage.idle[reason] ?? 0), 0) / devices.length]);
  const [reason, share] = sums.reduce((best, one) => one[1] > best[1] ? one : best);
  const most = `An idle device mostly ${REASONS[reason]}`;
  const first = stages.length > 1 ? `Stage ${busiest} is the busiest. ` : '';
  return share > 0.005 ? `${first}${most} (${percent(share)} of all device time).` : first;
}

function showCurve({ history, training }) {
  const points = history.map(point => [point[0], point[1]]), there = points.some(([, loss]) => loss !== null);
  $('curve-empty').hidden = there;
  $('curve').toggleAttribute('hidden', !there);
  if (!there) return;
  curve.draw([{ points }]);
  const each = points.length > 1 ? Math.round((points.at(-2)[0] - points[0][0]) / (points.length - 2 || 1)) : 1;
  write('curve-about', each > 1 ? `each point is the mean of ${each} steps` : '');
  $('curve').setAttribute('aria-label', `Loss over ${count(training.steps, 'step')}, now ${lossText(training.loss)}. ` +
    'Arrow keys go from step to step.');
}

function show(next) {
  state = next;
  heard = performance.now();
  showHead(state);
  showTiles(state);
  showStages(state);
  showWorkers(state);
  showCurve(state);
  // A picture that changes under the pointer cannot be read, so it is updated when the pointer has left.
  if (held()) write('timeline-about', 'paused while the pointer is on it');
  else showTimeline(state);
}

// ---- The pointer and the keyboard

let pointed = false, chosen = -1;
const held = () => (pointed && !$('tip').hidden) || chosen >= 0;

function choose(index) {
  timeline.pool[chosen]?.group.classList.remove('chosen');
  chosen = index;
  const mark = timeline.pool[index];
  if (!mark) return say('');
  mark.group.classList.add('chosen');
  const box = mark.rect.getBoundingClientRect();
  say(timeline.story(index), box.left, box.bottom);
}

function release() {
  pointed = false;
  choose(-1);
  if (state) showTimeline(state);
}

function point(event) {
  const mark = event.target.closest('.task');
  pointed = mark !== null;
  if (chosen < 0) say(mark ? timeline.story(+mark.dataset.index) : '', event.clientX, event.clientY);
}

$('timeline').addEventListener('pointermove', point);
$('timeline').addEventListener('pointerdown', point);
// A finger "leaves" when it is lifted, before its user has read the text; a touch elsewhere ends it instead.
$('timeline').addEventListener('pointerleave', event => { if (event.pointerType === 'mouse') release(); });
document.addEventListener('pointerdown', event => { if (pointed && !event.target.closest('#timeline')) release(); });
$('timeline').addEventListener('blur', release);
$('timeline').addEventListener('keydown', event => {
  const way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (event.key === 'Escape') release();
  if (!way || !timeline.order.length) return;
  event.preventDefault();
  const at = timeline.order.indexOf(chosen), last = timeline.order.length - 1;
  choose(timeline.order[at < 0 ? (way > 0 ? 0 : last) : Math.min(Math.max(at + way, 0), last)]);
});
readable(curve, say);
$('curve-log').addEventListener('change', event => { curve.log = event.target.checked; curve.redraw(); });

let resized = 0;
new ResizeObserver(() => {
  cancelAnimationFrame(resized);
  resized = requestAnimationFrame(() => {
    if (!state) return;
    showTiles(state);
    timeline.redraw();
    curve.redraw();
  });
}).observe(document.querySelector('main'));

// ---- The connection

const CONNECTION = {
  connecting: 'connecting', live: 'live', reconnecting: 'reconnecting', ended: document.body.dataset.ended ?? 'run ended',
};
const PAUSES = [1, 2, 4, 8, 15];
let source = null, failures = 0, ended = false;

function connection(name) {
  $('connection').dataset.state = name;
  write('connection-text', CONNECTION[name]);
  showQuiet();
}

// If the run makes no progress while the connection works, the page shows for how long. The text is not in the status,
// which screen readers would read out every second.
function showQuiet() {
  const seconds = Math.floor((performance.now() - heard) / 1000), live = $('connection').dataset.state === 'live';
  const since = seconds >= 120 ? `${Math.floor(seconds / 60)} min` : `${seconds} s`;
  write('quiet', live && seconds >= 10 ? `no step for ${since}` : '');
}

function connect() {
  source = new EventSource('events');
  source.addEventListener('state', event => {
    failures = 0;
    ended = false;
    show(JSON.parse(event.data));
    connection('live');
  });
  source.addEventListener('end', event => {
    show(JSON.parse(event.data));
    ended = true;
    connection('ended');
    again();
  });
  source.addEventListener('error', () => {
    // After the end of a run the page keeps showing it, and follows if the same program runs again.
    if (!ended) connection('reconnecting');
    // Browsers reconnect by themselves after a lost connection, and some also after a refused one, but not all.
    if (source.readyState === EventSource.CLOSED || ended) again();
  });
}

function again() {
  source.close();
  const pause = PAUSES[Math.min(failures++, PAUSES.length - 1)];
  setTimeout(connect, pause * 1000);
}

setInterval(showQuiet, 1000);
connect();
