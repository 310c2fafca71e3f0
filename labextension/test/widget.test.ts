import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import { encode } from '../src/codec';
import { KernelSource, type Model } from '../src/kernel';
import type { FromFeed } from '../src/source';

type Sent = { view: string; binary?: boolean; message?: string; bye?: boolean };

/** A model as anywidget gives it: what the kernel would get, and what it says. */
class FakeModel implements Model {
  readonly sent: Sent[] = [];
  private readonly callbacks = new Map<string, Set<(...args: never[]) => void>>();

  get(): unknown {
    return { job: 'a-job', text: 'still' };
  }

  on(event: string, callback: (...args: never[]) => void): void {
    this.callbacks.set(event, (this.callbacks.get(event) ?? new Set()).add(callback));
  }

  off(event: string, callback: (...args: never[]) => void): void {
    this.callbacks.get(event)?.delete(callback);
  }

  send(content: unknown): void {
    this.sent.push(content as Sent);
  }

  says(event: string, ...args: unknown[]): void {
    for (const callback of [...(this.callbacks.get(event) ?? [])]) {
      (callback as (...args: unknown[]) => void)(...args);
    }
  }

  get listeners(): number {
    return [...this.callbacks.values()].reduce((sum, set) => sum + set.size, 0);
  }
}

function connect(model: FakeModel) {
  const source = new KernelSource(model);
  const life = new AbortController();
  const heard: FromFeed[] = [];
  const lost: [string, boolean][] = [];
  let connections = 0;
  source.connect(
    {
      connected: () => {
        connections++;
        source.send({ type: 'open', logs: {} });
      },
      message: message => heard.push(message),
      lost: (why, final) => lost.push([why, final])
    },
    life.signal
  );
  return { source, life, heard, lost, view: model.sent[0]!.view, connections: () => connections };
}

describe('the kernel as a source', () => {
  beforeEach(() => void vi.useFakeTimers());
  afterEach(() => {
    vi.useRealTimers();
    delete (globalThis as { google?: unknown }).google;
  });

  it('opens at once, under a name of its own', () => {
    const model = new FakeModel();
    const one = connect(model);
    const two = new FakeModel();
    expect(JSON.parse(model.sent[0]!.message!)).toEqual({ type: 'open', logs: {} });
    expect(model.sent[0]!.binary).toBe(true);
    expect(connect(two).view).not.toBe(one.view);
  });

  it('hears text and buffers that are for it, in order, decoded', () => {
    const model = new FakeModel();
    const { heard, view } = connect(model);
    model.says('msg:custom', { view, messages: encode([{ n: 1, type: 'gone', reason: '@x' }]) }, []);
    const bytes = new TextEncoder().encode(encode([{ n: 2, value: NaN }, { n: 3 }]));
    model.says('msg:custom', { view }, [new DataView(bytes.buffer)]);
    model.says('msg:custom', { view: 'another', messages: '[{"n":9}]' }, []);
    model.says('msg:custom', null);
    expect(heard).toEqual([{ n: 1, type: 'gone', reason: '@x' }, { n: 2, value: NaN }, { n: 3 }]);
  });

  it('asks for text where messages have no buffers', () => {
    (globalThis as { google?: unknown }).google = { colab: {} };
    const model = new FakeModel();
    connect(model);
    expect(model.sent[0]!.binary).toBe(false);
  });

  it('knocks until a kernel that was busy answers', () => {
    const model = new FakeModel();
    const { lost, view, connections } = connect(model);
    vi.advanceTimersByTime(11_000);
    expect(connections()).toBe(3);
    expect(lost[0]![0]).toContain('■');
    expect(lost[0]![1]).toBe(false);
    model.says('msg:custom', { view, messages: '[{"n":1}]' }, []);
    vi.advanceTimersByTime(60_000);
    expect(connections()).toBe(3);
  });

  it('asks a silent kernel whether it is there, and says so when it is not', () => {
    const model = new FakeModel();
    const { lost, heard, view, connections } = connect(model);
    const says = (...messages: unknown[]) => model.says('msg:custom', { view, messages: encode(messages) }, []);
    says({ n: 1, type: 'hello', state: { state: 'running' } });
    vi.advanceTimersByTime(10_000);
    expect(model.sent.at(-1)).toEqual({ view, ping: true });
    says({ n: 0, type: 'alive' });
    vi.advanceTimersByTime(5000);
    expect(lost).toEqual([]);
    vi.advanceTimersByTime(10_000);
    expect(lost).toHaveLength(1);
    expect(lost[0]![0]).toContain('torchdist cancel a-job');
    expect(lost[0]![1]).toBe(false);
    expect(connections()).toBe(1);
    says({ n: 9, type: 'status' });
    expect(connections(), 'it was only busy').toBe(2);
    expect(heard).toHaveLength(1);
  });

  it('leaves the kernel alone when the job has ended and nothing was asked', () => {
    const model = new FakeModel();
    const { lost, source, view } = connect(model);
    const says = (...messages: unknown[]) => model.says('msg:custom', { view, messages: encode(messages) }, []);
    says(
      { n: 1, type: 'hello', state: { state: 'running' } },
      { n: 2, type: 'events', events: [{ kind: 'job.ended' }] }
    );
    vi.advanceTimersByTime(60_000);
    expect(model.sent).toHaveLength(1);
    source.send({ type: 'ask', id: 1, what: 'cancel', kill: false });
    vi.advanceTimersByTime(15_000);
    expect(lost).toHaveLength(1);
  });

  it('ends with the comm of its model', () => {
    const model = new FakeModel();
    const { lost } = connect(model);
    model.says('comm_live_update');
    expect(lost[0]![1]).toBe(true);
  });

  it('opens again when the kernel has forgotten it', () => {
    const model = new FakeModel();
    const { view, connections, heard } = connect(model);
    model.says('msg:custom', { view, messages: '[{"n":0,"type":"forgotten"}]' }, []);
    expect(connections()).toBe(2);
    expect(heard).toEqual([]);
  });

  it('says so when the kernel closes it', () => {
    const model = new FakeModel();
    const { lost } = connect(model);
    model.says('comm:close');
    expect(lost).toHaveLength(1);
    expect(lost[0]![1]).toBe(true);
  });

  it('leaves nothing behind, and says good bye', () => {
    const model = new FakeModel();
    const { life, source, view } = connect(model);
    life.abort();
    expect(model.listeners).toBe(0);
    expect(model.sent.at(-1)).toEqual({ view, bye: true });
    source.send({ type: 'ack', n: 1 });
    expect(model.sent.at(-1)).toEqual({ view, bye: true });
    expect(vi.getTimerCount()).toBe(0);
  });

  it('survives a model that can no longer send', () => {
    const model = new FakeModel();
    const warn = vi.spyOn(console, 'warn').mockImplementation(() => undefined);
    const { source } = connect(model);
    model.send = () => {
      throw new Error('closed');
    };
    expect(() => source.send({ type: 'ack', n: 1 })).not.toThrow();
    expect(warn).toHaveBeenCalled();
    warn.mockRestore();
  });
});

describe('the widget', () => {
  let widget: typeof import('../src/widget').default;

  beforeEach(async () => {
    // jsdom lays nothing out, and uPlot asks already while it is imported.
    vi.stubGlobal(
      'ResizeObserver',
      class {
        observe() {}
        unobserve() {}
        disconnect() {}
      }
    );
    vi.stubGlobal('matchMedia', () => ({ matches: false, addEventListener() {}, removeEventListener() {} }));
    Element.prototype.scrollTo ??= () => undefined;
    ({ default: widget } = await import('../src/widget'));
    vi.useFakeTimers();
  });
  afterEach(() => {
    vi.useRealTimers();
    vi.unstubAllGlobals();
    document.body.replaceChildren();
  });

  function aPlace(): HTMLElement {
    const el = document.createElement('div');
    document.body.append(el);
    return el;
  }

  it('draws a view, opens its feed, and goes without a trace', () => {
    const model = new FakeModel();
    const el = aPlace();
    const end = widget().render({ model, el });
    expect(el.querySelector('.td-view')).not.toBeNull();
    expect(JSON.parse(model.sent[0]!.message!)).toEqual({ type: 'open', logs: {} });
    end();
    vi.advanceTimersByTime(10_000);
    expect(el.childElementCount).toBe(0);
    expect(model.listeners).toBe(0);
    expect(model.sent.at(-1)!.bye).toBe(true);
  });

  it('is the same one in the next place when the output is drawn anew', () => {
    const model = new FakeModel();
    const { render } = widget();
    const [first, second, third] = [aPlace(), aPlace(), aPlace()];
    const endFirst = render({ model, el: first });
    const view = first.querySelector('.td-view')!;
    view.querySelector<HTMLElement>('[role=tab][data-tab=logs]')!.click();
    const search = view.querySelector<HTMLInputElement>('input[aria-label="search the lines"]')!;
    search.value = 'needle';
    search.focus();
    first.remove(); // JupyterLab: the old one is thrown out without a word, and never told that it ended
    const endSecond = render({ model, el: second });
    expect(second.querySelector('.td-view')).toBe(view);
    expect([search.value, document.activeElement]).toEqual(['needle', search]);
    expect(model.sent.filter(({ message }) => message?.includes('"open"'))).toHaveLength(1);
    endFirst();
    expect(second.querySelector('.td-view')).toBe(view);
    endSecond(); // others: first the end, then the next
    const endThird = render({ model, el: third });
    vi.advanceTimersByTime(10_000);
    expect(third.querySelector('.td-view')).toBe(view);
    endThird();
  });

  it('is another one beside a view that is still seen', () => {
    const model = new FakeModel();
    const { render } = widget();
    const ends = [aPlace(), aPlace()].map(el => render({ model, el }));
    expect(document.querySelectorAll('.td-view')).toHaveLength(2);
    ends.forEach(end => end());
    vi.advanceTimersByTime(10_000);
    expect(model.listeners).toBe(0);
  });
});
