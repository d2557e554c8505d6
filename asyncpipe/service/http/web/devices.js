// Who uses which device, now and over the last day: a row for each device with its jobs, and a strip of its runs.

import { ask, me, turns } from './api.js';
import { $, count, fill, make, set, size, span, whole, write } from './text.js';

const DAY = 86_400, MOST = 5000, HUES = 8, NOBODY = me.user ? 'others' : 'no user';
const clock = at => new Date(at * 1000).toLocaleString('en-GB', { weekday: 'short', hour: '2-digit', minute: '2-digit' });
const hours = seconds => seconds < 3600 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(seconds < 36_000 ? 1 : 0)} h`;
const svg = (parent, name, attributes) => {
  const element = parent.appendChild(document.createElementNS('http://www.w3.org/2000/svg', name));
  set(element, attributes);
  return element;
};

async function refresh() {
  const { now, devices, runs } = await ask('v1/devices');
  const { jobs } = await ask('v1/jobs?state=running&limit=1000');
  // A day that ends now; in it, each run has a user and a place of its own where a device has several at once.
  const begun = now - DAY, seen = runs.map(run => ({
    ...run, user: run.owner ?? NOBODY, from: Math.max(run.began, begun), to: Math.max(run.ended ?? now, begun),
  }));
  const used = new Map(), total = (user, device, seconds) => {
    const own = used.get(user) ?? new Map();
    used.set(user, own.set(device, (own.get(device) ?? 0) + seconds));
  };
  for (const run of seen) for (const device of new Set(run.devices)) total(run.user, device, run.to - run.from);
  const sum = user => [...used.get(user).values()].reduce((all, one) => all + one, 0);
  const users = [...used.keys()].sort((one, other) => sum(other) - sum(one));
  const hue = user => users.indexOf(user) < HUES ? `var(--line-${users.indexOf(user)})` : 'var(--faint)';
  write($('about'), `${count(devices.length, 'device')}, ${count(jobs.length, 'running job')}`);
  write($('use-about'), `${clock(begun)} to ${clock(now)}${runs.length < MOST ? '' : `, the last ${whole(MOST)} runs`}`);
  fill($('devices'), [devices, seen.map(run => [run.job, run.attempt, run.ended]), jobs.map(job => job.name), Math.floor(now / 60)], () => devices.map(
    device => row(device, seen.filter(run => run.devices.includes(device.name)), jobs, begun, hue)));
  fill($('users'), users.map(user => [user, hours(sum(user))]), () => users.map(user => {
    const item = make('li', user);
    item.style.setProperty('--colour', hue(user));
    return item;
  }));
  $('hours-section').hidden = !users.length;
  fill($('hours-head'), devices.map(({ name }) => name), () => [line('th', ['User', 'All', ...devices.map(({ name }) => name)])]);
  fill($('hours'), users.map(user => [user, ...used.get(user)]), () => users.map(user => line('td', [
    user, hours(sum(user)), ...devices.map(({ name }) => used.get(user).has(name) ? hours(used.get(user).get(name)) : '')])));
}

function line(cell, texts) {
  const made = make('tr');
  made.append(...texts.map((text, index) => make(index ? cell : 'th', text, index && cell === 'td' ? {} : { scope: index || cell === 'th' ? 'col' : 'row' })));
  return made;
}

function row({ name, places, memory_limit: limit }, runs, jobs, begun, hue) {
  const item = make('li', '', { class: 'device' }), head = make('div', '', { class: 'head' }), now = make('p', '', { class: 'now' });
  const there = runs.filter(run => run.ended === null).map(run => jobs.find(job => job.id === run.job) ?? { id: run.job, owner: run.owner });
  const all = there.reduce((sum, job) => sum + (job.priority_class === 'background' ? 0 : job.weight ?? 1), 0);
  head.append(make('h3', name), make('span', [places > 1 ? count(places, 'place') : '', limit === null ? '' : size(limit)].filter(Boolean).join(' · '), { class: 'faint' }));
  now.append(...there.flatMap((job, index) => {
    const share = job.priority_class === 'background' ? 'in the background' : all && there.length > 1 ? `share ${Math.round((job.weight ?? 1) / all * 100)} %` : '';
    const said = [job.owner, share].filter(Boolean).join(', ');
    return [index ? ' · ' : '', job.name ? make('a', job.name, { href: `jobs/${job.id}/` }) : 'a job', said ? make('span', ` (${said})`, { class: 'faint' }) : ''];
  }));
  if (!there.length) now.append(make('span', 'free', { class: 'faint' }));
  const left = make('div');
  left.append(head, now);
  item.append(left, strip(name, runs, begun, hue));
  return item;
}

// The runs of a device from left to right, one above the other where they shared it.
function strip(name, runs, begun, hue) {
  const ends = [], rows = runs.map(run => {
    const free = ends.findIndex(end => end <= run.from), at = free < 0 ? ends.length : free;
    ends[at] = run.to;
    return at;
  });
  const height = Math.max(ends.length, 1), busy = runs.reduce((sum, run) => sum + run.to - run.from, 0);
  const drawn = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  set(drawn, { class: 'strip', viewBox: `0 0 ${DAY} ${height}`, preserveAspectRatio: 'none', role: 'img',
    'aria-label': `${name} in the last 24 hours: ${count(runs.length, 'run')}, ${hours(busy)} in all` });
  runs.forEach((run, index) => {
    const box = svg(drawn, 'rect', { x: run.from - begun, y: rows[index] + 0.06, width: Math.max(run.to - run.from, 60), height: 0.88 });
    box.style.fill = hue(run.user);
    svg(box, 'title', {}).textContent = `${run.user}: job ${run.job}, run ${run.attempt}, from ${clock(run.began)}, ${span(run.to - run.began)}${run.ended === null ? ' so far' : ''}`;
  });
  for (const hour of [6, 12, 18]) svg(drawn, 'line', { class: 'tick', x1: hour * 3600, x2: hour * 3600, y1: 0, y2: height, 'vector-effect': 'non-scaling-stroke' });
  return drawn;
}

turns(refresh, 10)();
