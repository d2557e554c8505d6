// The live view: listens to the run's events and shows the newest state. Every message is a complete state, so a page
// may miss messages, and is up to date as soon as it has reconnected. Data goes into the page as text, never as markup.

import { Curve, Timeline, duration, spark } from './live_draw.js';

const $ = id => document.getElementById(id);
const timeline = new Timeline($('timeline')), curve = new Curve($('curve'), 260), tip = $('tip');
const REASONS = {
  busy: 'busy', dependency: 'waits for data', edge: 'waits for data on its way', copy: 'waits for a copy',
  shared: 'waits for another job', dispatch: 'waits for the scheduler', drain: 'has finished the step',
};
let state = null, heard = 0;

// ---- Text

function write(id, text) {
  const element = $(id);
  // A screen reader announces every assignment to a status, even of the same text.
  if (element.textContent !== text) element.textContent = text;
}

const percent = share => share === null || share === undefined ? '–' : `${(share * 100).toFixed(share < 0.0995 ? 1 : 0)} %`;

// "1 step", "2 steps".
const count = (number, thing) => `${number.toLocaleString('en')} ${thing}${number === 1 ? '' : 's'}`;

// At most four digits, and a letter for thousands: 12.3k.
function short(value) {
  if (value === null || value === undefined) return '–';
  const [size, letter] = [[1e9, 'G'], [1e6, 'M'], [1e4, 'k']].find(([size]) => Math.abs(value) >= size) ?? [1, ''];
  const scaled = value / (letter === 'k' ? 1e3 : size);
  return `${Math.abs(scaled) >= 1000 ? scaled.toFixed(0) : +scaled.toPrecision(3)}${letter}`;
}

const lossText = value => value === null ? 'not finite' : Math.abs(value) >= 1e4 ? short(value) : value.toPrecision(4);

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
  spark($('bubble-spark'), bubbles, step?.ideal ?? null);
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

function size(bytes) {
  if (bytes === null) return '–';
  const power = Math.min(Math.floor(Math.log2(Math.max(bytes, 1)) / 10), 4);
  return `${+(bytes / 1024 ** power).toPrecision(3)} ${['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}`;
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
      ...told(shares, stages, workers).map(([reason, share]) => `${REASONS[reason]}: ${percent(share)}`),
      ...(stage.in_flight === null ? [] : [`${stage.in_flight} in flight at most`]),
    ].join('\n');
    row.querySelector('.bar').setAttribute('aria-label', `Stage ${index} on ${stage.device}: ` +
      told(shares, stages, workers).map(([reason, share]) => `${REASONS[reason]} ${percent(share)}`).join(', '));
  });
  write('finding', step ? finding(step) : '');
  if (!step) return;
  const shared = stages.length > step.devices.length ? [['var(--track)', 'its device runs another stage']] : [];
  legend($('reasons'), [...told(REASONS, stages, workers).map(([reason, name]) => [`var(--${reason})`, name]), ...shared]);
}

// Entries by reason; on threads nothing is on its way, and most devices have one job.
const told = (reasons, stages, workers) => Object.entries(reasons).filter(([reason]) =>
  reason === 'edge' ? workers : reason !== 'shared' || stages.some(stage => stage.idle.shared > 0));

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
  curve.draw(points);
  const each = points.length > 1 ? Math.round((points.at(-2)[0] - points[0][0]) / (points.length - 2 || 1)) : 1;
  write('curve-about', each > 1 ? `each point is the mean of ${each} steps` : '');
  $('curve').setAttribute('aria-label', `Loss over ${count(training.steps, 'step')}, now ${lossText(training.loss)}`);
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
const held = () => (pointed && !tip.hidden) || chosen >= 0;

function say(text, x, y) {
  tip.hidden = !text;
  tip.textContent = text;
  if (!text) return;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(Math.min(x + 12, innerWidth - width - 8), 8)}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(y - height - 12, 8) : y + 18}px`;
}

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
$('curve').addEventListener('pointermove', event => {
  const point = curve.nearest(event.clientX);
  say(point ? `step ${Math.round(point[0])}\nloss ${lossText(point[1])}` : '', event.clientX, event.clientY);
});
$('curve').addEventListener('pointerleave', () => { say(''); curve.redraw(); });

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
  connecting: 'connecting', live: 'live', reconnecting: 'reconnecting', ended: 'run ended',
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
