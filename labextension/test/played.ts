/** A feed that a test plays: what it says, and answers to what the view asks. It keeps the numbers of protocol/feed.py. */
import { afterEach, beforeEach } from 'vitest';

import { newJobState, newRankState } from '../src/state';
import { JobSession } from '../src/session';
import type { ErrorRecord, JobSpec, JobState, Plan, RankState } from '../src/protocol';
import type { FromFeed, JobSource, Series, SourceHandlers, Status, ToFeed } from '../src/source';

// jsdom has neither; uPlot asks for the first when it is imported.
window.matchMedia ??= (query: string) =>
  ({ matches: false, media: query, addEventListener() {}, removeEventListener() {} }) as unknown as MediaQueryList;

export type Asked = Extract<ToFeed, { type: 'ask' }>;

export class PlayedFeed implements JobSource {
  readonly sent: ToFeed[] = [];
  /** What a question is answered with; null: not at all. */
  answer: (asked: Asked) => Record<string, unknown> | null = () => null;
  handlers!: SourceHandlers;
  private n = 0;

  connect(handlers: SourceHandlers): void {
    this.handlers = handlers;
  }

  send(message: ToFeed): void {
    this.sent.push(message);
    if (message.type === 'ask') {
      const answer = this.answer(message);
      if (answer) {
        queueMicrotask(() => this.say({ type: 'answer', id: message.id, ...answer }));
      }
    }
  }

  say(message: Record<string, unknown>): void {
    this.n += 1;
    this.handlers.message({ n: this.n, ...message } as FromFeed);
  }

  asked(what: string): Asked[] {
    return this.sent.filter((message): message is Asked => message.type === 'ask' && message.what === what);
  }
}

export const NOW = 1_767_225_600;

export function aRank(number: number, more: Partial<RankState> = {}): RankState {
  return {
    ...newRankState(number),
    host: 'box',
    pid: 100 + number,
    state: 'running',
    started: NOW,
    ready: NOW + 1,
    ...more
  };
}

export function aState(ranks: RankState[], more: Partial<JobState> = {}): JobState {
  return {
    ...newJobState(),
    job: '20260101-000000-0a1b2c',
    name: 'night run',
    label: 'Cell In[2]',
    state: 'running',
    world_size: ranks.length,
    submitted: NOW,
    ranks: Object.fromEntries(ranks.map(rank => [String(rank.rank), rank])),
    ...more
  };
}

export function anError(more: Partial<ErrorRecord> = {}): ErrorRecord {
  return {
    type: 'ValueError',
    module: 'builtins',
    message: 'batch 3 is empty',
    text: 'Traceback (most recent call last):\nValueError: batch 3 is empty',
    frames: [
      ['Cell In[2]', 3, '<module>', 'train(model)'],
      ['/opt/env/lib/python3.11/site-packages/torch/nn/functional.py', 10, 'linear', 'return _linear(x)']
    ],
    t: NOW + 5,
    ...more
  };
}

export const SPEC = {
  job: '20260101-000000-0a1b2c',
  kind: 'cell',
  source: 'import torch\ntrain(model)\nprint("done")',
  label: 'Cell In[2]',
  first_line: 2,
  options: { ranks: 2, out: ['auto'], collect: 'rank0', grace: 5, exclude: [], gpus: null, background: false },
  created: NOW,
  argv: [],
  notebook: 'a.ipynb'
} as unknown as JobSpec;

export const PLAN: Plan = {
  job: '20260101-000000-0a1b2c',
  world_size: 2,
  backend: 'gloo',
  nodes: [
    {
      name: 'box',
      ranks: [0, 1],
      gpus: ['GPU-a', 'GPU-b'],
      gpu_numbers: [4, 5],
      address: '127.0.0.1',
      interface: 'lo',
      host: '',
      threads: 1,
      reach: { python: '', scratch: '', setup: '', forward: '', login: '', bring: '' },
      packages: null
    }
  ],
  fresh: false,
  numa_binding: null,
  timeout: null,
  grace: 5,
  collect: 'rank0',
  out: ['auto'],
  env_names: [],
  strategy: {
    name: 'none',
    degrees: {},
    options: {},
    precision: 'fp32',
    compile: false,
    activation_checkpointing: false,
    grad_accumulation: 1,
    verify: 0,
    checkpoint: null,
    resume: false,
    since: 0,
    notes: []
  },
  role: 'default',
  run_id: '',
  port: 0,
  restarts: 0,
  least_nodes: null,
  died: null,
  virtual_local_rank: false,
  lease: 43200,
  asked: 0,
  driver: 1,
  sync: [],
  cwd: '',
  request: '',
  allocation: '',
  login: '',
  configuration: ''
};

export function hello(state: JobState, more: Record<string, unknown> = {}): Record<string, unknown> {
  return {
    type: 'hello',
    version: 1,
    now: Date.now() / 1000,
    job: state.job,
    spec: SPEC,
    plan: PLAN,
    receipt: [{ name: 'model', kind: 'model', what: 'Linear(1, 1)', size: 2_000_000, needed: 'line 3' }],
    notes: [],
    command: 'torchdist rerun 20260101-000000-0a1b2c',
    state,
    sizes: {},
    ...more
  };
}

export function status(more: Partial<Status> = {}): Record<string, unknown> {
  return {
    type: 'status',
    effective: 'running',
    progress: null,
    ranks: {},
    curves: { version: 0, names: [], note: '' },
    gauges: {},
    ...more
  };
}

export function aSeries(name: string, more: Partial<Series> = {}): Series {
  const y = [1, 0.5, 0.25];
  return { name, rank: null, x: [0, 1, 2], y, low: y, high: y, ...more };
}

/** Where views are drawn: an element of the document, and a signal that `end` gives. */
export interface Page {
  readonly root: HTMLElement;
  readonly signal: AbortSignal;
  end(): void;
}

/** A new one for each test; what was drawn ends with it. */
export function aPage(): Page {
  let life: AbortController;
  let root: HTMLElement;
  beforeEach(() => {
    life = new AbortController();
    root = document.createElement('div');
    document.body.append(root);
  });
  afterEach(() => {
    life.abort();
    root.remove();
  });
  return {
    get root() {
      return root;
    },
    get signal() {
      return life.signal;
    },
    end() {
      life.abort();
    }
  };
}

/** A session on a feed that said `messages`; it ends with `signal`. */
export async function played(
  signal: AbortSignal,
  ...messages: Record<string, unknown>[]
): Promise<{ feed: PlayedFeed; session: JobSession }> {
  const feed = new PlayedFeed();
  const session = new JobSession('20260101-000000-0a1b2c', feed, signal);
  feed.handlers.connected();
  messages.forEach(message => feed.say(message));
  await frames();
  return { feed, session };
}

/** Until what was said has reached the views. */
export async function frames(count = 3): Promise<void> {
  for (let frame = 0; frame < count; frame++) {
    await new Promise(resolve => requestAnimationFrame(() => resolve(null)));
  }
}

/** The first element that `selector` finds and that reads as `text` (or holds it). */
export function find(root: Element, selector: string, text = ''): HTMLElement {
  const found = [...root.querySelectorAll<HTMLElement>(selector)].find(each => (each.textContent ?? '').includes(text));
  if (!found) {
    throw new Error(`no ${selector} with “${text}” in ${root.textContent?.slice(0, 500)}`);
  }
  return found;
}

/** One event of the journal, as the feed says it. */
export function event(seq: number, kind: string, data: Record<string, unknown> = {}): Record<string, unknown> {
  return { type: 'events', events: [{ seq, t: 1_767_225_700, node: null, rank: null, kind, ...data }] };
}
