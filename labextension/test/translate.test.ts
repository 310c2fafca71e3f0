/** In another language no word of ours is left in English: what a view, the panel and the status bar show and name. */
import { CommandRegistry } from '@lumino/commands';
import { Widget } from '@lumino/widgets';
import { afterEach, beforeEach, expect, test } from 'vitest';

import { JobList } from '../src/joblist';
import { JobPanel } from '../src/panel';
import { RunningJobs } from '../src/status';
import { JobView } from '../src/view/job';
import { translateWith } from '../src/view/translate';
import { aPage, anError, aRank, aSeries, aState, frames, hello, NOW, played, status } from './played';
import { aSummary, Serving, until } from './serving';

/** Words of ranks, of the job and of Python, which are nobody's to translate. */
const DATA = `night run box train.ipynb Cell In loss model Linear ValueError batch is empty Traceback most recent call last
  import torch train print done a warning File line module functional py linear return _linear opt env lib python site
  packages torch nn gloo lo auto rank0 torchdist rerun epoch all_reduce GPU_a none fp32 line of rank kB MB GB min ms
  builtins Aa out GPU PNG SVG CSV OMP_NUM_THREADS home ann work`;

/** An option, what one types, a job's id. */
const NO_WORDS = /--\w+|%dist (doctor|profile JOB)|\d{8}-\d{6}-\w{6}/g;

const page = aPage();

beforeEach(() => {
  translateWith({
    one: (text, ...args) => filled(text, args),
    many: (single, many, count, ...args) => filled(count === 1 ? single : many, [count, ...args]),
    language: 'ja'
  });
});

afterEach(() => void translateWith(null));

/** A language whose letters are all wide; what is put in stays as it is. */
function filled(text: string, args: unknown[]): string {
  const wide = text.replace(/[A-Za-z]/g, letter => String.fromCharCode(letter.charCodeAt(0) + 0xfee0));
  return wide.replace(/%(\d+)/g, (_, place: string) => String(args[Number(place) - 1] ?? ''));
}

/** Whatever of an element is read or spoken. */
function shown(element: Element): string[] {
  const said = [...element.querySelectorAll('*')].flatMap(each =>
    ['aria-label', 'title', 'placeholder', 'alt'].map(name => each.getAttribute(name) ?? '')
  );
  const walk = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    said.push(walk.currentNode.nodeValue!);
  }
  return said.filter(text => text.trim() !== '');
}

function inEnglish(element: Element): string[] {
  const data = new Set(DATA.match(/\w+/g));
  const words = (text: string) =>
    (text.replace(NO_WORDS, '').match(/[A-Za-z_]\w+/g) ?? []).filter(word => !data.has(word));
  return [...new Set(shown(element).filter(text => words(text).length > 0))];
}

const RUNNING = aState(
  [
    aRank(0, { waiting: { operation: 'all_reduce', group: 'gloo:0', number: 3, since: NOW, size: 9, members: null } }),
    aRank(1),
    aRank(2, { state: 'starting', ready: 0 }),
    aRank(3, { state: 'done', ended: NOW + 9 })
  ],
  { notes: ['a warning'] }
);
const ENDED = aState(
  [
    aRank(0, { state: 'stopped', ended: NOW + 9 }),
    aRank(1, { state: 'failed', ended: NOW + 9, error: anError(), left: [['model', 'Linear']] }),
    aRank(2, { state: 'lost', ended: NOW + 9 }),
    aRank(3, { state: 'interrupted', ended: NOW + 9 })
  ],
  { state: 'failed', ended: NOW + 9, first_failure: 1 }
);
const GAUGES = {
  cpu: 90,
  memory: 1e9,
  memory_peak: 2e9,
  gpu: 5,
  gpu_memory: 1e9,
  gpu_memory_peak: 2e9,
  gpu_total: 8e9,
  gpu_clock: 1980,
  gpu_temperature: 60,
  looks: 240,
  waits: 10,
  loads: 0,
  network: 0,
  gpu_slowed: 'heat',
  gpu_errors: 0,
  gpu_xid: 79,
  nvlink_received: 1,
  nvlink_sent: 1,
  nvlink_errors: 0,
  place: 'Cell In[1], line 3'
};
const STATUS = status({
  progress: { desc: 'epoch', n: 3, total: 10 },
  ranks: { '0': { step: 3, last: { loss: 0.5 } } },
  curves: { version: 1, names: ['loss'], note: '' },
  gauges: { '0': { ...GAUGES, gpu_shared: true } }
});

test.each([
  ['running', RUNNING],
  ['ended', ENDED]
])('a view of a job that is %s', async (_, state) => {
  const segments = [0, 1].map(rank => ({
    file: `${rank}.out`,
    start: 0,
    end: 15,
    t: NOW,
    text: `line of rank ${rank}\n`
  }));
  const { feed, session } = await played(page.signal, hello(state), STATUS, { type: 'lines', segments });
  feed.answer = asked =>
    asked.what === 'curves' ? { version: 1, complete: true, series: [aSeries('loss')] } : { error: 'a warning' };
  const view = new JobView(page.root, session, { signal: page.signal });
  for (const tab of ['curves', 'logs', 'ranks', 'communication', 'receipt'] as const) {
    view.show(tab);
    await frames();
  }
  expect(shown(page.root).length).toBeGreaterThan(100);
  expect(inEnglish(page.root)).toEqual([]);
});

test('a view that has lost its feed, and one whose job is not there', async () => {
  for (const final of [false, true]) {
    const { feed, session } = await played(page.signal);
    new JobView(page.root, session, { signal: page.signal, still: document.createElement('p') });
    expect(inEnglish(page.root)).toEqual([]);
    feed.handlers.lost('', final);
    await frames();
    expect(inEnglish(page.root)).toEqual([]);
  }
});

test('the panel and the item of the status bar', async () => {
  const serving = await Serving.start();
  const states = [
    'running',
    'submitted',
    'starting',
    'stopping',
    'succeeded',
    'failed',
    'cancelled',
    'timed_out',
    'lost'
  ];
  const jobs = [...states, 'orphaned'].map((state, i) =>
    aSummary(`${i}`, { effective: state, ended: NOW, name: 'night' })
  );
  serving.greeting = [{ type: 'jobs', now: NOW, jobs }];
  const list = new JobList(serving.settings, page.signal);
  const panel = new JobPanel(list, new CommandRegistry());
  const item = new RunningJobs(list, () => undefined);
  try {
    Widget.attach(panel, page.root);
    Widget.attach(item, page.root);
    expect(inEnglish(page.root)).toEqual([]);
    await until(() => page.root.querySelectorAll('.td-row').length === jobs.length, 'the rows');
    expect(shown(page.root).length).toBeGreaterThan(50);
    expect(inEnglish(page.root)).toEqual([]);
  } finally {
    panel.dispose();
    item.dispose();
    await serving.stop();
  }
});
