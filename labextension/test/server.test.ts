import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';

import { ServerSource } from '../src/server';
import type { FromFeed, ToFeed } from '../src/source';
import { Serving, timeByTurns, until } from './serving';

timeByTurns();

let serving: Serving;
let life: AbortController;
let ups = 0;
let messages: FromFeed[] = [];
let losses: { why: string; final: boolean }[] = [];

beforeEach(async () => {
  serving = await Serving.start();
  life = new AbortController();
  ups = 0;
  messages = [];
  losses = [];
});

afterEach(async () => {
  life.abort();
  await serving.stop();
});

function connect(job = 'a job'): ServerSource {
  const source = new ServerSource(serving.settings, job);
  source.connect(
    {
      connected: () => (ups += 1),
      message: message => messages.push(message),
      lost: (why, final) => losses.push({ why, final })
    },
    life.signal
  );
  return source;
}

test('speaks below the base address, with the token', async () => {
  serving.greeting = [{ n: 1, type: 'events', events: ['@nan'] }];
  const source = connect();
  await until(() => messages.length === 1, 'a message');
  expect(serving.asked).toEqual(['WS /user/ann/torchdist/api/jobs/a%20job/feed?token=a%2Ftoken']);
  expect(messages[0]).toEqual({ n: 1, type: 'events', events: [NaN] });
  source.send({ type: 'open', logs: { '0.out': 3 } });
  await until(() => serving.heard.length === 1, 'the open');
  expect(serving.heard).toEqual([{ type: 'open', logs: { '0.out': 3 } }]);
});

test('a broken connection is opened again', async () => {
  connect();
  await until(() => ups === 1, 'up');
  serving.drop();
  await until(() => ups === 2, 'up again');
  expect(losses).toEqual([{ why: expect.stringContaining('was lost'), final: false }]);
});

test('a job that the server does not know is final', async () => {
  serving.refuse = 404;
  connect();
  await until(() => losses.length === 1, 'the loss');
  expect(losses).toEqual([{ why: expect.stringContaining('has no such job'), final: true }]);
  await new Promise(resolve => setTimeout(resolve, 400));
  expect(serving.asked.filter(asked => asked.startsWith('WS'))).toHaveLength(1);
});

test('a proxy that lets no WebSocket through is said, and tried again', async () => {
  serving.refuse = 400;
  serving.answer = () => ({ status: 200, body: {} });
  connect();
  await until(() => losses.length === 2, 'two losses');
  expect(losses[0]).toEqual({ why: expect.stringContaining('refused the live connection'), final: false });
  serving.refuse = 0;
  await until(() => ups === 1, 'up at last');
});

test('a job whose files are damaged is final', async () => {
  serving.refuse = 409;
  serving.answer = () => ({ status: 409, body: { message: 'spec.json is damaged', hint: 'run the cell again' } });
  connect();
  await until(() => losses.length === 1, 'the loss');
  expect(losses).toEqual([{ why: 'spec.json is damaged; run the cell again', final: true }]);
});

test('a server that is down is awaited, less and less often', async () => {
  connect();
  await until(() => ups === 1, 'up');
  const { port } = serving;
  await serving.stop();
  await until(() => losses.length === 2, 'lost and not back');
  expect(losses[1]!.why).toContain('does not answer');
  expect(losses[1]!.final).toBe(false);
  serving = await Serving.start(port);
  await until(() => ups === 2, 'up again');
});

test('nothing is tried after the feed said that the job is gone', async () => {
  serving.greeting = [{ n: 1, type: 'gone', reason: 'deleted' }];
  connect();
  await until(() => messages.length === 1, 'gone');
  serving.drop();
  await new Promise(resolve => setTimeout(resolve, 400));
  expect(ups).toBe(1);
  expect(losses).toEqual([]);
});

test('the signal ends it, also between two attempts', async () => {
  connect();
  await until(() => ups === 1, 'up');
  serving.drop();
  await until(() => losses.length === 1, 'down');
  life.abort();
  await new Promise(resolve => setTimeout(resolve, 400));
  expect(ups).toBe(1);
  expect(serving.sockets).toHaveLength(0);
});

describe('a line that is cut without a word', () => {
  test('is found by its silence, and opened again', async () => {
    connect();
    await until(() => ups === 1, 'up');
    vi.advanceTimersByTime(14_000);
    expect(losses).toEqual([]);
    vi.advanceTimersByTime(3_000);
    await until(() => ups === 2, 'up again');
    expect(losses).toEqual([{ why: expect.stringContaining('was lost'), final: false }]);
  });

  test('is not thought of while empty messages come, which are nobody’s', async () => {
    connect();
    await until(() => ups === 1, 'up');
    for (let beat = 0; beat < 5; beat++) {
      vi.advanceTimersByTime(10_000);
      await serving.beat();
    }
    expect([ups, losses, messages]).toEqual([1, [], []]);
  });

  test('is found while it is being opened, too', async () => {
    serving.deaf = true;
    serving.answer = method => ({ status: method === 'POST' ? 405 : 200, body: {} });
    connect();
    await until(() => serving.asked.length === 1, 'the attempt');
    serving.deaf = false;
    vi.advanceTimersByTime(17_000);
    await until(() => serving.sockets.length === 1, 'open at the second attempt');
    expect(losses).toEqual([{ why: expect.stringContaining('refused the live connection'), final: false }]);
  });

  test('is no loss while it is being opened and requests stand for it', async () => {
    serving.deaf = true;
    serving.answer = () => ({ status: 200, body: { messages: [{ n: 1, type: 'events', events: [] }] } });
    connect();
    vi.advanceTimersByTime(600);
    await until(() => messages.length === 1, 'a turn');
    serving.deaf = false;
    vi.advanceTimersByTime(17_000);
    await until(() => serving.sockets.length === 1, 'open at the second attempt');
    expect(losses).toEqual([]);
    serving.drop();
    await until(() => losses.length === 1, 'a loss of what was open');
  });
});

describe('a socket that is not opened yet', () => {
  const TURN = 'POST /user/ann/torchdist/api/jobs/a%20job/turn';
  let source: ServerSource;

  /** What a session says as soon as it is connected, and again after each loss. */
  function speaks(...said: ToFeed[]): void {
    serving.deaf = true;
    source = new ServerSource(serving.settings, 'a job');
    source.connect(
      {
        connected: () => {
          ups += 1;
          said.forEach(message => source.send(message));
        },
        message: message => messages.push(message),
        lost: (why, final) => losses.push({ why, final })
      },
      life.signal
    );
  }

  function turns(): number {
    return serving.asked.filter(asked => asked === TURN).length;
  }

  test('is stood for by requests, until it is open', async () => {
    serving.answer = () => ({ status: 200, body: { messages: [{ n: 1, type: 'events', events: ['@nan'] }] } });
    speaks({ type: 'open', logs: { '0.out': 3 } }, { type: 'ask', id: 1, what: 'cancel', kill: true });
    await until(() => turns() === 2, 'two turns');
    const said = {
      messages: [
        { type: 'open', logs: { '0.out': 3 } },
        { type: 'ask', id: 1, what: 'cancel', kill: true }
      ]
    };
    expect(serving.bodies.map(body => JSON.parse(body))).toEqual([said, said]);
    expect(messages[0]).toEqual({ n: 1, type: 'events', events: [NaN] });
    source.send({ type: 'ack', n: 1 });
    serving.hear();
    await until(() => serving.heard.length === 2, 'what is said over the socket');
    expect(serving.heard).toEqual(said.messages);
    const before = turns();
    await new Promise(resolve => setTimeout(resolve, 1200));
    expect([turns(), losses]).toEqual([before, []]);
  });

  test('is no reason to ask where it opens soon', async () => {
    connect();
    await until(() => ups === 1, 'up');
    await new Promise(resolve => setTimeout(resolve, 700));
    expect(turns()).toBe(0);
  });

  test('is not waited for where the server says that there is no such job', async () => {
    serving.answer = () => ({ status: 404, body: { message: 'no job', hint: 'look at the list' } });
    speaks({ type: 'open', logs: {} });
    await until(() => losses.length === 1, 'the loss');
    expect(losses).toEqual([{ why: expect.stringContaining('has no such job'), final: true }]);
    await until(() => serving.lines === 0, 'the attempt given up');
    await new Promise(resolve => setTimeout(resolve, 400));
    expect([ups, turns(), serving.lines]).toEqual([1, 1, 0]);
  });

  test('is not waited for after the feed’s last word', async () => {
    serving.answer = () => ({ status: 200, body: { messages: [{ n: 1, type: 'gone', reason: 'deleted' }] } });
    speaks({ type: 'open', logs: {} });
    await until(() => messages.length === 1, 'gone');
    serving.hear();
    await new Promise(resolve => setTimeout(resolve, 1200));
    expect([ups, turns(), losses]).toEqual([1, 1, []]);
  });

  test('is waited for where the server knows of no turns, or has trouble', async () => {
    serving.answer = () => ({ status: 500 });
    speaks({ type: 'open', logs: {} });
    await until(() => turns() === 2, 'asked again');
    serving.answer = () => ({ status: 405 });
    await until(() => turns() === 3, 'the last question');
    await new Promise(resolve => setTimeout(resolve, 1200));
    expect(turns()).toBe(3);
    serving.hear();
    await until(() => serving.heard.length === 1, 'the open, over the socket');
    expect(losses).toEqual([]);
  });

  test('is asked about no more after the view was closed', async () => {
    serving.answer = () => ({ status: 200, body: { messages: [] } });
    speaks({ type: 'open', logs: {} });
    await until(() => turns() === 1, 'a turn');
    life.abort();
    await new Promise(resolve => setTimeout(resolve, 1200));
    expect(turns()).toBe(1);
  });
});
