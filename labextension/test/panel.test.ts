import { CommandRegistry } from '@lumino/commands';
import { Widget } from '@lumino/widgets';
import { afterEach, beforeEach, expect, test } from 'vitest';

import type { JobSummary } from '../src/api';
import { itemOf } from '../src/commands';
import { JobList, type ListChange } from '../src/joblist';
import { JobPanel } from '../src/panel';
import { RunningJobs } from '../src/status';
import { JobRow } from '../src/row';
import { aSummary, Serving, timeByTurns, until } from './serving';

timeByTurns();

let serving: Serving;
let life: AbortController;
let list: JobList;
let panel: JobPanel;
let done: string[] = [];

beforeEach(async () => {
  serving = await Serving.start();
  serving.greeting = [
    {
      type: 'jobs',
      now: 1100,
      jobs: [
        aSummary('a', { name: 'train <b>', submitted: 1010, spark: [3, NaN, 1] }),
        aSummary('c', {
          label: 'Cell In[9]',
          state: 'failed',
          effective: 'failed',
          ended: 900,
          submitted: 800,
          rerun_of: 'b'
        }),
        aSummary('b', { label: 'Cell In[9]', state: 'failed', effective: 'failed', ended: 1020, submitted: 1000 })
      ]
    }
  ];
  life = new AbortController();
  done = [];
  const commands = new CommandRegistry();
  for (const id of ['open-job', 'cancel-job', 'rerun-job', 'reveal-cell', 'copy-command', 'delete-job']) {
    commands.addCommand(`torchdist:${id}`, { execute: args => void done.push(`${id} ${args['job']}`) });
  }
  list = new JobList(serving.settings, life.signal);
  panel = new JobPanel(list, commands);
  Widget.attach(panel, document.body);
  await until(() => rows().length === 3, 'the rows');
});

afterEach(async () => {
  panel.dispose();
  life.abort();
  await serving.stop();
});

function rows(): HTMLElement[] {
  return [...panel.node.querySelectorAll<HTMLElement>('.td-row')];
}

function actions(row: HTMLElement): (string | null)[] {
  return [...row.querySelectorAll('.td-row-action')].map(action => action.getAttribute('aria-label'));
}

function tell(message: Record<string, unknown>): void {
  serving.sockets.at(-1)!.send(JSON.stringify(message));
}

test('the newest first, named, with what can be done now', () => {
  const [first, second] = rows();
  expect(first!.querySelector('.td-row-title')!.textContent).toBe('train <b>');
  expect(first!.querySelector('.td-row-open')!.getAttribute('aria-label')).toMatch(
    /^Open train <b>: running, 2 ranks, .*, train.ipynb, started \d\d:\d\d:\d\d$/
  );
  expect(first!.querySelector('.td-row-more')!.textContent).toMatch(/^running · 2 ranks · .* · train\.ipynb $/);
  expect(first!.querySelector('.td-row-more .td-row-when')!.getAttribute('data-when')).toMatch(/^\d\d:\d\d:\d\d$/);
  expect(first!.querySelector<HTMLElement>('.td-row-open')!.title).toContain('train <b>');
  expect(actions(first!)[0]).toBe('Cancel train <b>…');
  expect(actions(second!)).toEqual([
    'Run Cell In[9] again',
    'Show the cell of Cell In[9]',
    'Copy the command of Cell In[9]',
    'Delete Cell In[9]…'
  ]);
  expect(panel.node.querySelector('.td-panel-count')!.textContent).toBe('3 jobs, 1 running');
});

test('jobs of one name are told apart', () => {
  const [, own, again] = rows();
  expect(own!.querySelector('.td-row-title')!.textContent).toBe('Cell In[9]');
  expect(again!.querySelector('.td-row-title')!.textContent).toBe('Cell In[9] (again)');
  const items = [...list.jobs.values()].map(job => itemOf(job, 1100));
  expect(items[1]).toMatch(/^Cell In\[9\] \(again\) · failed · \d\d:\d\d:\d\d · train\.ipynb · c$/);
});

test('the memory of the GPUs stands in the row while the job runs', async () => {
  const facts = () => rows()[0]!.querySelector('.td-row-gpu')!.textContent;
  const held = { submitted: 1010, gpus: ['GPU-1'], gpu_memory: [12e9, 80e9] };
  tell({ type: 'changes', now: 1101, jobs: [aSummary('a', held)], gone: [] });
  await until(() => facts()!.includes('GPU 12 of 80 GB'), 'the memory');
  expect(rows()[0]!.querySelector('.td-row-open')!.getAttribute('aria-label')).toContain('GPU 12 of 80 GB');
  expect(rows()[1]!.textContent).not.toContain('GB');
  tell({
    type: 'changes',
    now: 1102,
    jobs: [aSummary('a', { ...held, effective: 'succeeded', ended: 1102 })],
    gone: []
  });
  await until(() => !facts()!.includes('GB'), 'its end');
});

test('ranks that wait, and a last value that is no number, are told in words', async () => {
  const text = (part: string) => rows()[0]!.querySelector(`.td-row-${part}`)!.textContent;
  const name = () => rows()[0]!.querySelector('.td-row-open')!.getAttribute('aria-label');
  const status = new RunningJobs(list, () => undefined);
  expect(status.node.textContent).toBe('1 distributed job');
  const wait = { ranks: [0, 1], collective: 'all_reduce #17', awaited: [2], since: Date.now() / 1000 };
  const told = { submitted: 1010, wait, broken: ['loss', 'lr', 'a', 'b'] };
  tell({ type: 'changes', now: Date.now() / 1000, jobs: [aSummary('a', told)], gone: [] });
  await until(() => text('waits') !== '', 'the wait');
  expect(text('waits')).toMatch(/^ranks 0, 1 wait in all_reduce #17 for rank 2, for \d s$/);
  expect(text('broken')).toBe('The last value is not a number: loss, lr, a and 1 more');
  expect(name()).toContain(text('waits'));
  expect(rows()[0]!.hasAttribute('data-waits')).toBe(true);
  expect(status.node.textContent).toBe('1 distributed job, 1 waiting');
  expect(status.node.querySelector('[data-state=waiting] svg')).not.toBeNull();
  const finding = { sentence: 'rank 2 has not entered all_reduce #17' };
  const stall = { since: Date.now() / 1000 - 34.5, told: 0, finding, ends: false };
  tell({ type: 'changes', now: Date.now() / 1000, jobs: [aSummary('a', { ...told, stall })], gone: [] });
  await until(() => text('waits')!.startsWith('stalled'), 'the stall');
  expect(text('waits')).toBe('stalled 34 s: rank 2 has not entered all_reduce #17');
  expect(text('facts')).toMatch(/^stalled · 2 ranks/);
  expect(status.node.textContent).toBe('1 distributed job, 1 stalled');
  expect(status.node.querySelector('[data-state=stalled] svg')).not.toBeNull();
  tell({ type: 'changes', now: 1102, jobs: [aSummary('a', { submitted: 1010 })], gone: [] });
  await until(() => text('waits') === '', 'it went on');
  expect(rows()[0]!.hasAttribute('data-waits')).toBe(false);
  expect(status.node.textContent).toBe('1 distributed job');
  status.dispose();
});

test('the spark line goes from the least to the greatest value, and leaves out what is no number', async () => {
  const spark = () => rows()[0]!.querySelector('.td-row-spark')!;
  const points = () => spark().querySelector('polyline')!.getAttribute('points');
  expect(points()).toBe('0.0,1.0 60.0,15.0');
  expect(spark().hasAttribute('hidden')).toBe(false);
  tell({ type: 'changes', now: 1101, jobs: [aSummary('a', { submitted: 1010, spark: [5] })], gone: [] });
  await until(() => spark().hasAttribute('hidden'), 'one value alone');
  const greatest = [1e308, 0, -1e308];
  tell({ type: 'changes', now: 1102, jobs: [aSummary('a', { submitted: 1010, spark: greatest })], gone: [] });
  await until(() => !spark().hasAttribute('hidden'), 'three values');
  expect(points()).toBe('0.0,1.0 30.0,8.0 60.0,15.0');
});

test('samples a second stand in the row while the job runs', () => {
  const row = new JobRow('a', () => {});
  const facts = (samples: number | null, now: number, more: object = {}): string => {
    row.update(aSummary('a', { submitted: 1000, samples, ...more }) as unknown as JobSummary, now);
    return row.element.querySelector('.td-row-facts')!.textContent!;
  };
  expect(facts(null, 1000)).not.toContain('samples');
  facts(0, 1001);
  expect(facts(640, 1011)).toContain('64 samples/s');
  expect(facts(640, 1011, { effective: 'succeeded', state: 'succeeded', ended: 1011 })).not.toContain('samples');
  row.dispose();
});

test('the progress bar is as wide as what is done, and without a total it has no end', async () => {
  const row = () => rows()[0]!;
  const bar = () => row().querySelector<HTMLElement>('.td-row-bar')!;
  const width = () => row().querySelector<HTMLElement>('.td-row-fill')!.style.width;
  const name = () => row().querySelector('.td-row-open')!.getAttribute('aria-label');
  const progress = async (told: object | null, more: object = {}) => {
    const before = list.jobs.get('a');
    tell({ type: 'changes', now: 1101, jobs: [aSummary('a', { submitted: 1010, progress: told, ...more })], gone: [] });
    await until(() => list.jobs.get('a') !== before, 'the change');
    await new Promise(resolve => requestAnimationFrame(resolve));
  };
  expect(bar().hidden).toBe(true);
  await progress({ desc: 'epoch 2', n: 30, total: 120 });
  expect(bar().hidden).toBe(false);
  expect(bar().hasAttribute('data-endless')).toBe(false);
  expect(width()).toBe('25%');
  expect(name()).toContain('train.ipynb, epoch 2 25 %, started');
  await progress({ desc: 'epoch 2', n: 60, total: 120 });
  expect(rows()[0]!.querySelector('.td-row-facts')!.textContent).toMatch(
    / · [\d.\u202f]+ it\/s · .* left · train\.ipynb$/
  );
  await progress({ desc: '', n: 150, total: 120 });
  expect(width()).toBe('100%');
  expect(name()).toContain('train.ipynb, 100 %, started');
  await progress({ desc: 'epoch 2', n: 31, total: null });
  expect(bar().hasAttribute('data-endless')).toBe(true);
  expect(name()).toContain('train.ipynb, started');
  await progress({ desc: 'epoch 2', n: 31, total: 120 }, { effective: 'succeeded', state: 'succeeded', ended: 1101 });
  expect(bar().hidden).toBe(true);
  expect(name()).not.toContain('%');
});

test('changes, ends and jobs that go', async () => {
  const seen: ListChange[] = [];
  list.onChange(change => seen.push(change), life.signal);
  const ended = aSummary('a', { submitted: 1010, state: 'succeeded', effective: 'succeeded', ended: 1100 });
  tell({ type: 'changes', now: 1101, jobs: [ended], gone: ['b', 'c'] });
  await until(() => rows().length === 1, 'one row');
  expect(seen[0]!.ended.map(job => job.job)).toEqual(['a']);
  expect(rows()[0]!.dataset['tone']).toBe('succeeded');
  const killed = { ...ended, state: 'cancelled', effective: 'cancelled', reason: 'killed on request' };
  tell({ type: 'changes', now: 1102, jobs: [killed], gone: [] });
  await until(() => rows()[0]!.querySelector('.td-row-reason')!.textContent === 'killed on request', 'the reason');
  expect(list.running).toBe(0);
});

test('trouble is said, and goes', async () => {
  const trouble = panel.node.querySelector<HTMLElement>('.td-panel-trouble')!;
  tell({ type: 'trouble', now: 1101, message: 'the disk is full', hint: 'make room' });
  await until(() => trouble.textContent === 'the disk is full; make room', 'the trouble');
  serving.drop();
  await until(() => trouble.textContent!.includes('was lost'), 'the loss');
  await until(() => trouble.hidden, 'connected again');
});

test('the filter', async () => {
  const filter = panel.node.querySelector('input')!;
  filter.value = 'cell failed';
  filter.dispatchEvent(new Event('input'));
  await until(() => rows().length === 2, 'two rows');
  expect(rows().map(row => row.dataset['job'])).toEqual(['b', 'c']);
});

test('keys walk the rows, buttons and keys act', () => {
  const opens = [...panel.node.querySelectorAll<HTMLElement>('.td-row-open')];
  opens[0]!.focus();
  opens[0]!.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowDown', bubbles: true }));
  expect(document.activeElement).toBe(opens[1]);
  expect(opens.map(open => open.tabIndex)).toEqual([-1, 0, -1]);
  opens[1]!.dispatchEvent(new KeyboardEvent('keydown', { key: 'Delete', bubbles: true }));
  opens[0]!.click();
  rows()[0]!.querySelector<HTMLElement>('.td-row-action')!.click();
  expect(done).toEqual(['delete-job b', 'open-job a', 'cancel-job a']);
});

test('a thousand jobs are there at once', async () => {
  const jobs = Array.from({ length: 1000 }, (_, i) => aSummary(`j${i}`, { submitted: i }));
  tell({ type: 'jobs', now: 1102, jobs });
  await until(() => rows().length === 200, 'the first page');
  expect(rows()[0]!.dataset['job']).toBe('j999');
  panel.node.querySelector<HTMLElement>('.td-panel-more')!.click();
  await until(() => rows().length === 400, 'the next page');
});

test('the list comes by requests while its socket is not open', async () => {
  const own = new AbortController();
  serving.deaf = true;
  serving.answer = () => ({ status: 200, body: { now: 1100, jobs: [aSummary('d')] } });
  const waiting = new JobList(serving.settings, own.signal);
  await until(() => waiting.loaded, 'the list');
  expect([...waiting.jobs.keys()]).toEqual(['d']);
  serving.answer = () => ({ status: 200, body: { now: 1100, jobs: [] } });
  await until(() => waiting.jobs.size === 0, 'the list as it is now');
  serving.hear();
  await until(() => waiting.jobs.size === 3, 'what the socket says');
  const asked = serving.asked.length;
  await new Promise(resolve => setTimeout(resolve, 1200));
  expect(serving.asked).toHaveLength(asked);
  own.abort();
});
