import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';
import { JobSession, type Change } from '../src/session';
import type { FromFeed, JobSource, SourceHandlers, ToFeed } from '../src/source';
import { newJobState } from '../src/state';

type Spoken = FromFeed extends infer M ? (M extends { n: number } ? Omit<M, 'n'> : never) : never;

/** A feed that a test speaks for. */
class SpokenFeed implements JobSource {
  sent: ToFeed[] = [];
  handlers!: SourceHandlers;
  n = 0;

  connect(handlers: SourceHandlers): void {
    this.handlers = handlers;
  }

  send(message: ToFeed): void {
    this.sent.push(structuredClone(message));
  }

  up(): void {
    this.n = 0;
    this.handlers.connected();
  }

  say(message: Spoken, n = ++this.n): void {
    this.handlers.message({ ...message, n } as FromFeed);
  }

  hello(version = 1): void {
    const empty = { spec: null, plan: null, receipt: [], notes: [], command: '', sizes: {} };
    this.say({ type: 'hello', version, now: Date.now() / 1000 + 7, job: 'j', state: newJobState(), ...empty });
  }

  lines(file: string, start: number, text: string, n?: number): void {
    this.say({ type: 'lines', segments: [{ file, start, end: start + text.length, t: 1, text }] }, n);
  }

  of(type: ToFeed['type']): ToFeed[] {
    return this.sent.filter(message => message.type === type);
  }
}

let source: SpokenFeed;
let end: AbortController;
let session: JobSession;
let seen: Change[][];

beforeEach(() => {
  vi.useFakeTimers();
  source = new SpokenFeed();
  end = new AbortController();
  session = new JobSession('j', source, end.signal);
  seen = [];
  session.onChange(changes => seen.push([...changes].sort()), end.signal);
});

afterEach(() => {
  end.abort();
  vi.useRealTimers();
});

const frame = (): void => void vi.advanceTimersByTime(300);

function text(): string[] {
  return [...session.logs.order.view()].map(row => session.logs.text(row));
}

test('begins with open; hello makes it live; changes come together, then the ack', () => {
  expect(session.connection).toBe('connecting');
  source.up();
  expect(source.sent).toEqual([{ type: 'open', logs: {} }]);
  source.hello();
  source.lines('0.out', 0, 'a\n');
  source.say({ type: 'events', events: [{ kind: 'rank.ready', t: 1, rank: 0, seq: 1, node: null }] });
  expect(source.of('ack')).toEqual([]);
  frame();
  expect(seen).toEqual([['connection', 'lines', 'state']]);
  expect(source.of('ack')).toEqual([{ type: 'ack', n: 3 }]);
  expect([session.connection, session.state.ranks[0]!.state, text()]).toEqual(['live', 'running', ['a']]);
  expect(session.clockSkew).toBeCloseTo(7, 0);
  frame();
  expect(seen).toHaveLength(1);
});

test('a lost transport: goes on from what is held, and doubles nothing', () => {
  source.up();
  source.hello();
  source.lines('0.out', 0, 'a\nb\n');
  source.handlers.lost('The server is away.', false);
  expect([session.connection, session.reason]).toEqual(['lost', 'The server is away.']);
  frame();
  expect(source.of('ack')).toEqual([]);
  source.up();
  expect(source.sent.at(-1)).toEqual({ type: 'open', logs: { '0.out': 4 } });
  source.hello();
  source.lines('0.out', 2, 'b\nc\n');
  frame();
  expect([session.connection, text()]).toEqual(['live', ['a', 'b', 'c']]);
});

describe('very many lines at once', () => {
  const line = `${'x'.repeat(99)}\n`;

  beforeEach(() => {
    source.up();
    source.hello();
    frame();
    // Each look at the clock finds that 5 ms have passed.
    let now = performance.now();
    vi.spyOn(performance, 'now').mockImplementation(() => (now += 5));
    source.lines('0.out', 0, line.repeat(1000));
    source.lines('1.out', 0, line.repeat(10));
    source.say({ type: 'events', events: [] });
  });

  afterEach(() => void vi.restoreAllMocks());

  test('are taken in over several frames, and acknowledged when they are', () => {
    vi.advanceTimersByTime(20);
    expect(session.logs.length).toBeGreaterThan(100);
    expect(session.logs.length).toBeLessThan(900);
    expect(source.of('ack').at(-1)).toEqual({ type: 'ack', n: 1 });
    vi.advanceTimersByTime(2000);
    expect(text()).toEqual(Array(1010).fill(line.trim()));
    expect(session.logs.offsets()).toEqual({ '0.out': 100_000, '1.out': 1000 });
    expect(source.of('ack').at(-1)).toEqual({ type: 'ack', n: 4 });
  });

  test('are not asked for again when the transport is lost meanwhile', () => {
    source.handlers.lost('The server is away.', false);
    source.up();
    expect(source.sent.at(-1)).toEqual({ type: 'open', logs: { '0.out': 100_000, '1.out': 1000 } });
    source.hello();
    vi.advanceTimersByTime(2000);
    expect(session.logs.length).toBe(1010);
    expect(source.of('ack').at(-1)).toEqual({ type: 'ack', n: 1 });
  });
});

describe('message numbers', () => {
  beforeEach(() => {
    source.up();
    source.hello();
  });

  test('a gap leads to a new open, and to the lines in their order', () => {
    source.lines('0.out', 0, 'a\n');
    source.lines('0.out', 4, 'c\n', 4);
    source.lines('0.out', 2, 'b\n', 3);
    frame();
    expect(source.of('open')).toEqual([
      { type: 'open', logs: {} },
      { type: 'open', logs: { '0.out': 2 } }
    ]);
    source.n = 4;
    source.hello();
    source.lines('0.out', 2, 'b\nc\n');
    frame();
    expect(text()).toEqual(['a', 'b', 'c']);
  });

  test('a message that comes twice is taken once', () => {
    const event = { kind: 'job.note', text: 'once', t: 1, rank: null, node: null, seq: 1 };
    source.say({ type: 'events', events: [event] }, 2);
    source.say({ type: 'events', events: [event] }, 2);
    expect(session.state.notes).toEqual(['once']);
  });

  test('a feed that always mixes them up is asked again more and more slowly', () => {
    for (let i = 0; i < 40; i++) {
      source.lines('0.out', 0, 'x\n', 50);
      vi.advanceTimersByTime(250);
      source.say({ type: 'lines', segments: [] }, 0);
      source.n = 0;
      source.hello();
    }
    expect(source.of('open').length).toBeLessThan(10);
  });

  test('an open without an answer is repeated', () => {
    source.lines('0.out', 0, 'x\n', 9);
    vi.advanceTimersByTime(11_000);
    expect(source.of('open').length).toBeGreaterThanOrEqual(3);
  });
});

test('unknown and damaged messages pass', () => {
  const error = vi.spyOn(console, 'error').mockImplementation(() => undefined);
  source.up();
  source.hello();
  source.say({ type: 'dances' } as never);
  source.say({ type: 'lines' } as never);
  source.say({ type: 'events', events: [null, { kind: 'a.kind.of.tomorrow', t: 1, rank: null, seq: 9 }] });
  source.lines('0.out', 0, 'a\n');
  frame();
  expect([session.connection, session.state.seq, text()]).toEqual(['live', 9, ['a']]);
  expect(error).toHaveBeenCalledOnce();
  error.mockRestore();
});

describe('questions', () => {
  test('the answer, or the feed’s own words', async () => {
    source.up();
    source.hello();
    const [first, second] = [session.ask({ what: 'cancel', kill: false }), session.ask({ what: 'cancel', kill: true })];
    source.say({ type: 'answer', id: 2, error: 'The job has ended.' });
    source.say({ type: 'answer', id: 1, said: 'It is being stopped.' });
    source.say({ type: 'answer', id: 77 });
    await expect(first).resolves.toMatchObject({ said: 'It is being stopped.' });
    await expect(second).rejects.toThrow('The job has ended.');
  });

  test('asked while the transport is down: again when it is up', async () => {
    const answer = session.ask({ what: 'cancel', kill: false });
    expect(source.sent).toEqual([]);
    source.up();
    expect(source.sent.map(message => message.type)).toEqual(['open', 'ask']);
    source.handlers.lost('away', false);
    source.up();
    expect(source.of('ask')).toHaveLength(2);
    source.say({ type: 'answer', id: 1, said: 'yes' });
    await expect(answer).resolves.toMatchObject({ said: 'yes' });
  });

  test('without an answer for 30 s it says so', async () => {
    source.up();
    const answer = expect(session.ask({ what: 'cancel', kill: false })).rejects.toThrow('30 s');
    vi.advanceTimersByTime(30_001);
    await answer;
  });

  test('are rejected when the view is closed or the job gone', async () => {
    const closed = expect(session.ask({ what: 'cancel', kill: false })).rejects.toThrow('closed');
    end.abort();
    await closed;
    await expect(session.ask({ what: 'cancel', kill: false })).rejects.toThrow('closed');
  });
});

test('gone is the end', async () => {
  source.up();
  source.hello();
  const answer = expect(session.ask({ what: 'cancel', kill: false })).rejects.toThrow('deleted');
  source.say({ type: 'gone', reason: 'Its files were deleted.' });
  await answer;
  source.lines('0.out', 0, 'a\n');
  source.handlers.lost('x', false);
  frame();
  expect([session.connection, session.reason, text()]).toEqual(['gone', 'Its files were deleted.', []]);
});

test('no such job: gone with the reason of the source', () => {
  source.handlers.lost('There is no such job here.', true);
  expect([session.connection, session.reason]).toEqual(['gone', 'There is no such job here.']);
});

test('another version says what to do', () => {
  source.up();
  source.hello(2);
  expect(session.connection).toBe('gone');
  expect(session.reason).toContain('Reload');
});

test('a view that fails stops no other', () => {
  const error = vi.spyOn(console, 'error').mockImplementation(() => undefined);
  const other = vi.fn();
  const own = new AbortController();
  session.onChange(() => {
    throw new Error('x');
  }, own.signal);
  session.onChange(other, own.signal);
  source.up();
  source.hello();
  frame();
  expect(other).toHaveBeenCalledOnce();
  own.abort();
  source.lines('0.out', 0, 'a\n');
  frame();
  expect(other).toHaveBeenCalledOnce();
  error.mockRestore();
});
