import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';
import type { LineQueue } from '../src/linequeue';
import { JobSession } from '../src/session';
import type { FromFeed, JobSource, Segment, SourceHandlers, ToFeed } from '../src/source';
import { newJobState, newRankState } from '../src/state';
import { fitting } from '../src/view/logcolumns';
import { STANDS } from '../src/view/loglist';
import { LogsTab } from '../src/view/logs';

/** A feed with one long file per rank, which answers as the real one. */
class Files implements JobSource {
  handlers!: SourceHandlers;
  asked: ToFeed[] = [];
  n = 0;

  connect(handlers: SourceHandlers): void {
    this.handlers = handlers;
  }

  send(message: ToFeed): void {
    this.asked.push(message);
    if (message.type === 'ask') {
      queueMicrotask(() => this.say({ type: 'answer', id: message.id, ...this.answer(message) } as never));
    }
  }

  say(message: object): void {
    this.handlers.message({ ...message, n: ++this.n } as FromFeed);
  }

  private answer(message: Extract<ToFeed, { type: 'ask' }>): object {
    switch (message.what) {
      case 'older': {
        const at = message.at['0.out']!;
        return {
          segments: [lines('0.out', Math.max(0, at / 10 - 20), at / 10)],
          at: { '0.out': Math.max(0, at - 200) }
        };
      }
      case 'around':
        return { segments: [lines('0.out', message.offset / 10 - 2, message.offset / 10 + 3)] };
      case 'search':
        // The beginning of the file, which the browser does not hold.
        return {
          hits: message.regex ? [{ file: '0.out', start: 70, t: 1, text: 'line    7' }] : [],
          at: null,
          searched: 1
        };
      case 'display':
        return message.number === 7
          ? { error: 'rank 1 has no display 7' }
          : { data: { 'image/png': 'aGk=\n', 'text/plain': 'a \x1b[1mfigure\x1b[0m' }, metadata: {} };
      default:
        return { error: 'There is no such question.' };
    }
  }
}

/** Lines `from` to `to` of ten bytes each. */
function lines(file: string, from: number, to: number): Segment {
  const text = Array.from({ length: to - from }, (_, i) => `line ${String(from + i).padStart(4)}\n`).join('');
  return { file, start: from * 10, end: to * 10, t: from + 1, text };
}

let end: AbortController;
let files: Files;
let session: JobSession;
let element: HTMLElement;
let tab: LogsTab;

beforeEach(() => {
  end = new AbortController();
  files = new Files();
  session = new JobSession('j', files, end.signal);
  element = document.createElement('div');
  document.body.append(element);
  files.handlers.connected();
});

afterEach(() => {
  end.abort();
  element.remove();
});

function hello(worldSize: number, state: object = {}): void {
  const said = { version: 1, now: 0, job: 'j', spec: null, plan: null, receipt: [], notes: [], command: '', sizes: {} };
  files.say({ type: 'hello', ...said, state: { ...newJobState(), world_size: worldSize, ...state } });
}

/** A busy machine takes its time. */
const PATIENT = { timeout: 20_000 };

async function open(): Promise<void> {
  await settled();
  tab = new LogsTab(element, session, end.signal);
  tab.show();
}

async function settled(): Promise<void> {
  await vi.waitFor(() => expect(session['changes' as never] as Set<string>).toHaveProperty('size', 0), PATIENT);
  await vi.waitFor(() => expect((session['lines' as never] as LineQueue).empty).toBe(true), PATIENT);
  await new Promise(resolve => setTimeout(resolve, 30));
}

const rows = (): string[] => [...element.querySelectorAll('.td-log-row')].map(row => row.textContent!);
const scroller = (): HTMLElement => element.querySelector('.td-logs-scroll')!;
const key = (name: string, more: object = {}): boolean =>
  scroller().dispatchEvent(new KeyboardEvent('keydown', { key: name, bubbles: true, ...more }));

function click(label: RegExp): void {
  const found = [...element.querySelectorAll('button')].find(one => label.test(one.getAttribute('aria-label') ?? ''));
  found!.click();
}

function type(text: string): void {
  const box = element.querySelector('input')!;
  box.value = text;
  box.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter' }));
}

describe('what ranks displayed', () => {
  const line = (file: string, text: string, start = 0): Segment => {
    return { file, start, end: start + text.length, t: 1, text };
  };
  const region = (): HTMLElement => element.querySelector('.td-logs-display')!;
  const shows = (): HTMLButtonElement[] => [...element.querySelectorAll<HTMLButtonElement>('.td-log-row button')];

  test('a line says that there is a picture; it is shown below, and closed again by the keyboard', async () => {
    hello(2);
    await open();
    files.say({ type: 'lines', segments: [line('1.out', 'a\n[display 3: image/png] Figure(640x480)\n')] });
    await settled();
    expect(region().hidden).toBe(true);
    key('End');
    key('Enter');
    await vi.waitFor(() => expect(region().querySelector('img')).not.toBeNull());
    expect(files.asked).toContainEqual(expect.objectContaining({ what: 'display', rank: 1, number: 3 }));
    const picture = region().querySelector('img')!;
    expect(picture.src).toBe('data:image/png;base64,aGk=');
    expect(picture.alt).toBe('a figure');
    expect(document.activeElement).toBe(region());
    expect(region().getAttribute('aria-label')).toBe('rank 1, display 3');
    region().dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape', bubbles: true }));
    expect(region().hidden).toBe(true);
    expect(region().querySelector('img')).toBeNull();
    expect(document.activeElement).toBe(scroller());
  });

  test('a line that only looks like one says so; other text has no button', async () => {
    hello(2);
    await open();
    const text = '[display 7: image/png]\n[display x: image/png]\n[display 1: picture]\n[display 1: a/b] <img src=x>\n';
    files.say({ type: 'lines', segments: [line('1.out', text)] });
    await settled();
    expect(shows().map(each => each.getAttribute('aria-label'))).toEqual([
      'Show display 7 of rank 1',
      'Show display 1 of rank 1'
    ]);
    shows()[0]!.click();
    await vi.waitFor(() => expect(region().textContent).toContain('rank 1 has no display 7'));
    expect(element.querySelector('img')).toBeNull();
  });

  test('the pictures of all ranks stay apart, though their lines are alike', async () => {
    hello(2);
    await open();
    const both = (text: string): Segment[] => ['0.out', '1.out'].map(file => line(file, text));
    files.say({ type: 'lines', segments: both('alike\n[display 1: image/png] Figure\n') });
    await settled();
    expect(rows()).toEqual([
      '[all 2 ranks]alike',
      '[rank 0]Show[display 1: image/png] Figure',
      '[rank 1]Show[display 1: image/png] Figure'
    ]);
  });

  test('a renderer of the page draws it, and ends with it', async () => {
    const signals: AbortSignal[] = [];
    hello(2);
    await settled();
    tab = new LogsTab(element, session, end.signal, {
      render: (shown, into, signal) => {
        into.append(Object.keys(shown.data).join());
        signals.push(signal);
        return Promise.resolve();
      }
    });
    tab.show();
    files.say({ type: 'lines', segments: [line('1.out', '[display 1: image/png] one\n[display 2: image/png] two\n')] });
    await settled();
    shows()[0]!.click();
    await vi.waitFor(() => expect(region().textContent).toContain('image/png,text/plain'));
    shows()[1]!.click();
    await vi.waitFor(() => expect(signals).toHaveLength(2));
    expect(signals.map(({ aborted }) => aborted)).toEqual([true, false]);
    end.abort();
    expect(signals[1]!.aborted).toBe(true);
  });
});

describe('a traceback that the failure says already', () => {
  const text = 'Traceback (most recent call last):\n  File "x.py", line 3\n    f(0)\nValueError: no good\n';
  const error = { type: 'ValueError', module: 'builtins', message: 'no good', text, frames: [], t: 1 };
  const failed = (...ranks: number[]): object => ({
    state: 'failed',
    ranks: Object.fromEntries(ranks.map(rank => [rank, { ...newRankState(rank), state: 'failed', error }]))
  });
  const said = (rank: number, before = ''): Segment[] => {
    const whole = before + text + 'after\n';
    return [{ file: `${rank}.err`, start: 0, end: whole.length, t: 1, text: whole }];
  };
  const ofAll = (): void => [...element.querySelectorAll('button')].find(each => each.textContent === 'All')!.click();
  const turn = (): HTMLButtonElement => element.querySelector('.td-log-row button[aria-expanded]')!;

  test('is one line, which opens and folds', async () => {
    hello(2, failed(1));
    await open();
    files.say({ type: 'lines', segments: said(1, 'before\n') });
    await settled();
    const folded = [
      '[rank 1]before',
      '[rank 1]Show 4 linesTraceback (most recent call last): … ValueError: no good',
      '[rank 1]after'
    ];
    expect(rows()).toEqual(folded);
    turn().click();
    await settled();
    expect(rows()).toHaveLength(6);
    expect(rows()[4]).toBe('[rank 1]ValueError: no good');
    turn().click();
    await settled();
    expect(rows()).toEqual(folded);
  });

  test('the failure may be known after its lines; other lines stay as they are', async () => {
    hello(3);
    await open();
    files.say({ type: 'lines', segments: [...said(0), ...said(1)] });
    await settled();
    expect(rows()).toHaveLength(10);
    const state = { ...newJobState(), world_size: 3, ...failed(1) };
    const other = { ...newRankState(0), state: 'failed', error: { ...error, text: text.replace('no', 'not') } };
    files.say({
      type: 'hello',
      version: 1,
      now: 0,
      job: 'j',
      spec: null,
      plan: null,
      receipt: [],
      notes: [],
      command: '',
      sizes: {},
      state: { ...state, first_failure: 1, ranks: { ...state.ranks, 0: other } }
    });
    await settled();
    ofAll();
    expect(rows()).toHaveLength(7);
    expect(rows().filter(row => row.startsWith('[rank 1]'))).toHaveLength(2);
  });

  test('it is folded in a log that is opened afterwards, too', async () => {
    hello(1, failed(0));
    files.say({ type: 'lines', segments: said(0) });
    await open();
    expect(rows()).toHaveLength(2);
  });

  test('the same of all ranks is one line', async () => {
    hello(2, failed(0, 1));
    await open();
    files.say({ type: 'lines', segments: [...said(0), ...said(1)] });
    await settled();
    ofAll();
    expect(rows()).toEqual([
      '[all 2 ranks]Show 4 linesTraceback (most recent call last): … ValueError: no good',
      '[all 2 ranks]after'
    ]);
  });

  test('a search looks into it', async () => {
    hello(1, failed(0));
    await open();
    files.say({ type: 'lines', segments: said(0) });
    await settled();
    expect(rows()).toHaveLength(2);
    type('x.py');
    await settled();
    expect(rows()).toHaveLength(5);
    expect(element.querySelector('.td-hit-current')!.textContent).toBe('x.py');
    type('');
    await settled();
    expect(rows()).toHaveLength(2);
  });

  test('what is copied is whole', async () => {
    const write = vi.fn(() => Promise.resolve());
    vi.stubGlobal('navigator', { ...navigator, clipboard: { writeText: write } });
    hello(1, failed(0));
    await open();
    files.say({ type: 'lines', segments: said(0) });
    await settled();
    click(/[Cc]opy/);
    await vi.waitFor(() => expect(write).toHaveBeenCalledWith(`${text}after`));
    vi.unstubAllGlobals();
  });
});

test('a list that was taken out of the document and stands in it again goes on at its end', async () => {
  hello(1);
  await open();
  files.say({ type: 'lines', segments: [lines('0.out', 0, 5000)] });
  await settled();
  scroller().scrollTop = 0; // as the browser leaves it, or somebody who remembered an older place
  scroller().dispatchEvent(new Event(STANDS));
  scroller().dispatchEvent(new Event('scroll'));
  expect(rows().at(-1)).toBe('[rank 0]line 4999');
  files.say({ type: 'lines', segments: [lines('0.out', 5000, 5010)] });
  await settled();
  expect(rows().at(-1)).toBe('[rank 0]line 5009');
});

test('a list that becomes lower goes on following, though the browser scrolls it', async () => {
  hello(1);
  await open();
  files.say({ type: 'lines', segments: [lines('0.out', 0, 5000)] });
  await settled();
  Object.defineProperty(scroller(), 'clientHeight', { value: 120 });
  scroller().scrollTop = 1000;
  scroller().dispatchEvent(new Event('scroll'));
  expect(rows().at(-1)).toBe('[rank 0]line 4999');
});

test('the row that the keyboard is at is named while it is in the document', async () => {
  hello(1);
  await open();
  files.say({ type: 'lines', segments: [lines('0.out', 0, 5000)] });
  await settled();
  key('End');
  expect(element.querySelector(`#${scroller().getAttribute('aria-activedescendant')}`)).not.toBeNull();
  scroller().scrollTop = 0;
  scroller().dispatchEvent(new Event('scroll'));
  expect(scroller().hasAttribute('aria-activedescendant')).toBe(false);
});

test('where nothing is shown it says what could be chosen instead', async () => {
  hello(2);
  await open();
  files.say({ type: 'lines', segments: [lines('0.out', 0, 3)] });
  await settled();
  const said = (): string => element.querySelector('.td-logs-empty')!.textContent!;
  expect(said()).toBe('');
  tab.focusRank(1);
  await vi.waitFor(() => expect(said()).toBe('These ranks and streams have printed nothing yet.'), PATIENT);
  type('zzz');
  click(/show only lines/);
  await vi.waitFor(() => expect(said()).toBe('No line of these ranks and streams matches the search.'), PATIENT);
  click(/all ranks/);
  await vi.waitFor(() => expect(said()).toBe('No line matches the search.'), PATIENT);
});

test('only what is in sight is in the document, and the end is followed', async () => {
  hello(1);
  await open();
  expect(element.querySelector('.td-logs-empty')!.textContent).toContain('Nothing was printed');
  files.say({ type: 'lines', segments: [lines('0.out', 0, 5000)] });
  await settled();
  expect(rows().length).toBeLessThan(60);
  expect(rows().at(-1)).toBe('[rank 0]line 4999');
  expect(scroller().getAttribute('aria-rowcount')).toBe('5000');
});

test('the rank that failed comes first and is chosen', async () => {
  const failed = { ...newRankState(1), state: 'failed', ended: 5 };
  hello(3, { ranks: { 0: newRankState(0), 1: failed, 2: newRankState(2) }, first_failure: 1 });
  files.say({ type: 'lines', segments: [lines('0.err', 0, 2), lines('1.err', 0, 2)] });
  await open();
  const chips = [...element.querySelectorAll('[data-rank]')].map(chip => chip.textContent);
  expect(chips).toEqual(['1', '0', '2']);
  expect(rows()).toEqual(['[rank 1]line    0', '[rank 1]line    1']);
  click(/all ranks$/);
  expect(rows()).toHaveLength(4);
});

test('each rank says how it stands, on its button and at its lines', async () => {
  const waiting = { operation: 'barrier', group: 'gloo:0', number: 3, since: 1, size: 0, members: null };
  const running = { ...newRankState(0), state: 'running' };
  hello(2, { state: 'running', ranks: { 0: { ...running, waiting }, 1: { ...running, rank: 1 } } });
  files.say({ type: 'lines', segments: [lines('0.out', 0, 1), lines('0.out', 1, 2)] });
  await open();
  const button = (rank: number): HTMLElement => element.querySelector(`button[data-rank='${rank}']`)!;
  expect(button(0).title).toBe('rank 0: waiting in barrier #3');
  expect(button(0).querySelector('[data-tone=waiting] svg')).not.toBeNull();
  const row = element.querySelector('.td-log-row')!;
  expect(row.querySelector<HTMLElement>('.td-log-who')!.title).toMatch(/^out · .*\nrank 0 now: waiting in barrier #3$/);
  const over = { t: 3, node: null, rank: 0, seq: 9, kind: 'rank.exited', state: 'killed', why: 'was killed (SIGKILL)' };
  files.say({ type: 'events', events: [over] });
  await settled();
  expect(button(0).getAttribute('aria-label')).toBe('rank 0: was killed (SIGKILL)');
  expect(button(0).querySelectorAll('svg')).toHaveLength(1);
  expect(button(1).querySelector('[data-tone=running]')).not.toBeNull();
  click(/all ranks$/);
  // The row is the same element: it was not drawn again.
  expect(element.querySelector('.td-log-row')).toBe(row);
  expect(row.querySelector<HTMLElement>('.td-log-who')!.title).toContain('rank 0 now: was killed (SIGKILL)');
});

test('a list of many ranks says it too', async () => {
  const ranks = Array.from({ length: 20 }, (_, rank) => ({ ...newRankState(rank), state: 'running' }));
  hello(20, { state: 'running', ranks: Object.fromEntries(ranks.map(rank => [rank.rank, rank])) });
  await open();
  const list = element.querySelector<HTMLSelectElement>('[role=group] select')!;
  expect(list.options[3]!.textContent).toBe('rank 2: running');
  expect(list.title).toBe('20 running');
  files.say({ type: 'events', events: [{ t: 3, node: null, rank: 2, seq: 9, kind: 'rank.done' }] });
  await settled();
  expect(list.options[3]!.textContent).toBe('rank 2: done');
  list.value = '2';
  list.dispatchEvent(new Event('change'));
  expect(list.title).toBe('done');
  expect(list.previousElementSibling!.getAttribute('data-tone')).toBe('succeeded');
});

test('one stream is shown alone, of all ranks or of one', async () => {
  hello(2);
  const said = [lines('0.out', 0, 1), lines('0.err', 1, 2), lines('1.out', 2, 3), lines('1.err', 3, 4)];
  files.say({ type: 'lines', segments: said });
  await open();
  const choose = (stream: string): void => {
    const list = element.querySelector<HTMLSelectElement>('select[aria-label=stream]')!;
    list.value = stream;
    list.dispatchEvent(new Event('change'));
  };
  expect(rows()).toHaveLength(4);
  choose('err');
  expect(rows()).toEqual(['[rank 0]line    1', '[rank 1]line    3']);
  click(/^rank 1/);
  expect(rows()).toEqual(['[rank 1]line    3']);
  choose('out');
  expect(rows()).toEqual(['[rank 1]line    2']);
  click(/all ranks$/);
  expect(rows()).toEqual(['[rank 0]line    0', '[rank 1]line    2']);
  choose('');
  expect(rows()).toHaveLength(4);
});

test('what all ranks say is one row, until it is not folded', async () => {
  hello(2);
  files.say({ type: 'lines', segments: [lines('0.out', 0, 1), lines('1.out', 0, 1)] });
  await open();
  expect(rows()).toEqual(['[all 2 ranks]line    0']);
  click(/^Fold alike/);
  expect(rows()).toEqual(['[rank 0]line    0', '[rank 1]line    0']);
});

test('a search finds what is held, then the rest, and goes there', async () => {
  hello(1);
  files.say({ type: 'lines', segments: [lines('0.out', 100, 300)] });
  await open();
  type('7$');
  await settled();
  expect(element.querySelector('[aria-label=search] [role=status]')!.textContent).toBe('0 hits');
  click(/regular expression/);
  await settled();
  expect(element.querySelector('[aria-label=search] [role=status]')!.textContent).toBe('1 of 21, newest first');
  expect(element.querySelector('.td-hit-current')!.textContent).toBe('7');
  click(/newer hit/);
  await settled();
  expect(session.logs.holds('0.out', 70)).toBe(true);
  expect(rows()).toContain('[rank 0]line    7');
  expect(element.querySelector('.td-log-active')!.textContent).toBe('[rank 0]line    7');
  click(/only lines/);
  expect(
    rows()
      .filter(row => row.includes('line'))
      .every(row => row.endsWith('7'))
  ).toBe(true);
});

test('while one types, the nearest hit comes into sight; Enter goes on to the next', async () => {
  hello(1);
  files.say({ type: 'lines', segments: [lines('0.out', 0, 300)] });
  await open();
  const box = element.querySelector('input')!;
  const active = (): string => element.querySelector('.td-log-active')?.textContent ?? '';
  box.value = 'line  12';
  box.dispatchEvent(new Event('input'));
  await vi.waitFor(() => expect(active()).toBe('[rank 0]line  129'), PATIENT);
  box.value = 'line  121';
  box.dispatchEvent(new Event('input'));
  await vi.waitFor(() => expect(active()).toBe('[rank 0]line  121'), PATIENT);
  box.value = 'line  1';
  box.dispatchEvent(new Event('input'));
  await vi.waitFor(() => expect(element.querySelectorAll('.td-hit').length).toBeGreaterThan(9), PATIENT);
  await settled();
  const chosen = Number(active().slice(-3));
  expect(chosen).toBeGreaterThan(120);
  expect(chosen).toBeLessThan(150);
  box.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter' }));
  expect(active()).toBe(`[rank 0]line  ${chosen - 1}`);
});

test('Enter goes to the newest hit first, then to older ones; all in sight are marked, one more than the others', async () => {
  hello(1);
  files.say({ type: 'lines', segments: [lines('0.out', 0, 30)] });
  await open();
  const count = (): string => element.querySelector('[aria-label=search] [role=status]')!.textContent!;
  type('2');
  await settled();
  expect(count()).toBe('1 of 12, newest first');
  expect(element.querySelector('.td-log-active')!.textContent).toBe('[rank 0]line   29');
  const marks = [...element.querySelectorAll('.td-hit')];
  expect(marks.length).toBeGreaterThan(9);
  expect(marks.filter(mark => mark.classList.contains('td-hit-current'))).toHaveLength(1);
  type('2');
  expect(count()).toBe('2 of 12, newest first');
  expect(element.querySelector('.td-log-active')!.textContent).toBe('[rank 0]line   28');
  files.say({ type: 'lines', segments: [lines('0.out', 30, 33)] });
  await settled();
  expect(count()).toBe('3 of 13, newest first');
  const back = new KeyboardEvent('keydown', { key: 'Enter', shiftKey: true });
  element.querySelector('input')!.dispatchEvent(back);
  expect(element.querySelector('.td-log-active')!.textContent).toBe('[rank 0]line   29');
});

test('what stands in front of the lines is as wide for all', async () => {
  hello(12);
  files.say({ type: 'lines', segments: [lines('0.out', 0, 1)] });
  await open();
  const width = (): string => scroller().style.getPropertyValue('--td-who');
  expect(width()).toBe(String('[all 12 ranks]'.length));
  click(/^Fold alike/);
  expect(width()).toBe(String('[rank 11]'.length));
});

test('what only the feed can search for is found by it, in what is held too', async () => {
  hello(1);
  files.say({ type: 'lines', segments: [lines('0.out', 0, 30)] });
  await open();
  click(/regular expression/);
  type('^(?!step)');
  await settled();
  const asked = files.asked.filter(message => message.type === 'ask');
  expect(asked.at(-1)).toMatchObject({ what: 'search', pattern: '^(?!step)', at: null });
  expect(element.querySelector('[aria-label=search] [role=status]')!.textContent).toBe('1 hit');
  expect(element.textContent).toContain('The search ran beside the job');
  click(/older hit/);
  await settled();
  expect(element.querySelector('.td-log-active')!.textContent).toBe('[rank 0]line    7');
  type('line');
  await settled();
  expect(element.textContent).not.toContain('The search ran beside the job');
});

test('a pattern that is none is told', async () => {
  hello(1);
  await open();
  click(/regular expression/);
  type('(');
  expect(element.querySelector('input')!.getAttribute('aria-invalid')).toBe('true');
});

test('the keys move, select and load what is older', async () => {
  hello(1);
  files.say({ type: 'lines', segments: [lines('0.out', 50, 200)] });
  await open();
  key('Home');
  expect(element.querySelector('.td-log-active')!.textContent).toContain('line   50');
  expect(element.querySelector('[aria-label^=Follow]')!.getAttribute('aria-pressed')).toBe('false');
  await settled();
  expect(files.asked.some(message => message.type === 'ask' && message.what === 'older')).toBe(true);
  expect(session.logs.starts()).toEqual({ '0.out': 300 });
  expect(element.querySelector('.td-log-active')!.textContent).toContain('line   50');
  key('ArrowDown', { shiftKey: true });
  expect(element.querySelectorAll('[aria-selected=true]')).toHaveLength(2);
  key('a', { ctrlKey: true });
  expect(element.querySelectorAll('[aria-selected=false]')).toHaveLength(0);
  key('Escape');
  expect(element.querySelectorAll('[aria-selected=true]')).toHaveLength(0);
  key('/');
  expect(document.activeElement).toBe(element.querySelector('input'));
  key('End');
  expect(rows().at(-1)).toContain('line  199');
});

test('a gap says how much it is and is loaded on request', async () => {
  hello(1);
  files.say({ type: 'lines', segments: [lines('0.out', 0, 2), lines('0.out', 6, 8)] });
  await open();
  expect(rows()[2]).toBe('[rank 0]40 B passed over hereLoad');
  element.querySelector<HTMLElement>('.td-log-gap button')!.click();
  await settled();
  expect(rows()).toEqual(Array.from({ length: 8 }, (_, i) => `[rank 0]line    ${i}`));
});

test('markup of a rank is text; a long line is cut and says how long it is', async () => {
  hello(1);
  const text = '<script>window.bad = 1</script>\n' + 'z'.repeat(10_000_000) + '\n';
  files.say({ type: 'lines', segments: [{ file: '0.out', start: 0, end: text.length, t: 1, text }] });
  await open();
  expect(element.querySelector('script')).toBeNull();
  expect(rows()[0]).toContain('<script>');
  expect(rows()[1]!.length).toBeLessThan(5000);
  expect(rows()[1]).toContain('10 MB in all');
});

test('all shown is copied, with who said it', async () => {
  const written: string[] = [];
  vi.stubGlobal('navigator', { clipboard: { writeText: async (text: string) => void written.push(text) } });
  hello(2);
  files.say({ type: 'lines', segments: [lines('0.out', 0, 2), lines('1.out', 0, 1)] });
  await open();
  click(/^Copy/);
  await settled();
  expect(written).toEqual(['[all 2 ranks] line    0\n[rank 0] line    1']);
  vi.unstubAllGlobals();
});

test('a hidden tab draws nothing, and is right when it is shown again', async () => {
  hello(1);
  await open();
  tab.hide();
  files.say({ type: 'lines', segments: [lines('0.out', 0, 3)] });
  await settled();
  expect(rows()).toEqual([]);
  tab.show();
  expect(rows()).toHaveLength(3);
});

describe('a line that not all ranks said', () => {
  const marked = (): string[] =>
    [...element.querySelectorAll('.td-log-differs')].map(row => row.querySelector('.td-log-text')!.textContent!);

  /** What the ranks say, a line of each at a time. */
  function say(...texts: string[][]): void {
    const ends = texts.map(() => 0);
    for (let line = 0; line < Math.max(...texts.map(its => its.length)); line++) {
      texts.forEach((its, rank) => {
        if (its[line] !== undefined) {
          const [start, text] = [ends[rank]!, `${its[line]}\n`];
          ends[rank] = start + text.length;
          files.say({
            type: 'lines',
            segments: [{ file: `${rank}.out`, start, end: ends[rank], t: 1 + line / 9, text }]
          });
        }
      });
    }
  }

  test('is marked among lines that are alike, in words too', async () => {
    hello(2);
    say(['one', 'two', 'three'], ['one', 'odd', 'two', 'three']);
    await open();
    expect(marked()).toEqual(['odd']);
    const row = element.querySelector('.td-log-differs')!;
    expect(row.textContent).toBe('[rank 1]odd');
    expect(row.querySelector<HTMLElement>('.td-log-who')!.title).toContain('Not all ranks said this');
    expect(element.querySelector<HTMLElement>('.td-log-row .td-log-who')!.title).not.toContain('Not all');
    click(/^Fold alike/);
    expect(marked()).toEqual([]);
    click(/^Fold alike/);
    expect(marked()).toEqual(['odd']);
    tab.focusRank(1);
    expect(marked()).toEqual([]);
  });

  test('is marked where each says another one', async () => {
    hello(2);
    say(['one', 'loss 1', 'two'], ['one', 'loss 2', 'two']);
    await open();
    expect(marked()).toEqual(['loss 1', 'loss 2']);
  });

  test('is no mark where nothing is alike, nor where the others may say it yet', async () => {
    hello(2, { state: 'running' });
    say(['one', 'a'], ['one', 'b', 'c']);
    await open();
    expect(rows()).toHaveLength(4);
    expect(marked()).toEqual([]);
    files.say({
      type: 'events',
      events: [{ t: 3, node: null, rank: null, seq: 9, kind: 'job.ended', state: 'failed' }]
    });
    await settled();
    expect(marked()).toEqual(['a', 'b', 'c']);
  });

  test('is no mark far from what is alike', async () => {
    hello(2);
    const steps = Array.from({ length: 10 }, (_, step) => `${step}`);
    say(['one', ...steps.map(step => `step ${step}`), 'two'], ['one', ...steps.map(step => `other ${step}`), 'two']);
    await open();
    expect(rows()).toHaveLength(22);
    expect(marked()).toEqual([]);
  });
});

describe('side by side', () => {
  const columns = (): string[] => [...element.querySelectorAll('.td-log-head')].map(head => head.textContent!);
  const texts = (column: number): string[] =>
    [...element.querySelectorAll('.td-log-column')[column]!.querySelectorAll('.td-log-text')].map(
      cell => cell.textContent!
    );
  const pressed = (): string[] =>
    [...element.querySelectorAll<HTMLElement>('[data-rank][aria-pressed=true]')].map(one => one.dataset['rank']!);

  async function eightRanks(): Promise<void> {
    const ranks = Array.from({ length: 8 }, (_, rank) => ({ ...newRankState(rank), state: 'running' }));
    ranks[5]!.state = 'failed';
    hello(8, { state: 'running', ranks: Object.fromEntries(ranks.map(rank => [rank.rank, rank])) });
    for (let rank = 0; rank < 8; rank++) {
      files.say({ type: 'lines', segments: [lines(`${rank}.out`, 0, rank + 1)] });
    }
    await open();
    click(/^Side by side/);
  }

  test('a column for each of some ranks, what failed first, and back', async () => {
    await eightRanks();
    expect(columns()).toEqual(['rank 5: failed', 'rank 0: running', 'rank 1: running', 'rank 2: running']);
    expect(texts(0)).toEqual(['line    0', 'line    1', 'line    2', 'line    3', 'line    4', 'line    5']);
    expect(texts(1)).toEqual(['line    0']);
    expect(element.querySelector('[aria-label=ranks] [role=status]')!.textContent).toBe('4 of 8 ranks: 5, 0, 1, 2');
    expect(element.querySelector<HTMLElement>('.td-logs-frame > .td-logs-scroll')!.hidden).toBe(true);
    expect(element.querySelector('[role=grid][aria-label="lines of rank 5"]')).not.toBeNull();
    click(/^Side by side/);
    expect(columns()).toEqual([]);
    expect(rows()[0]).toBe('[rank 5]line    0');
    expect(session.logs['views' as never]).toHaveProperty('size', 1);
  });

  test('the ranks are chosen by their buttons', async () => {
    await eightRanks();
    expect(pressed()).toEqual(['5', '0', '1', '2']);
    click(/^rank 7/);
    expect(pressed()).toEqual(['5', '0', '1', '7']);
    expect(columns().at(-1)).toBe('rank 7: running');
    click(/^rank 0/);
    click(/^rank 1/);
    click(/^rank 5/);
    click(/^rank 7/); // the last one stays
    expect(columns()).toEqual(['rank 7: running']);
    click(/all ranks$/);
    expect(columns()).toHaveLength(4);
  });

  test('new lines come to the column of their rank, whose head says how it stands', async () => {
    await eightRanks();
    files.say({ type: 'lines', segments: [lines('0.out', 1, 3)] });
    const over = { t: 3, node: null, rank: 0, seq: 9, kind: 'rank.exited', state: 'killed', why: 'was killed' };
    files.say({ type: 'events', events: [over] });
    await settled();
    expect(texts(1)).toEqual(['line    0', 'line    1', 'line    2']);
    expect(texts(2)).toHaveLength(2);
    expect(columns()[1]).toBe('rank 0: was killed');
  });

  test('they scroll together by time, and follow together', async () => {
    hello(2);
    // Rank 1 says each line ten seconds after rank 0 does.
    const late = { ...lines('1.out', 0, 1), t: 11 };
    files.say({ type: 'lines', segments: [late] });
    for (let line = 0; line < 300; line++) {
      files.say({ type: 'lines', segments: [{ ...lines('0.out', line, line + 1), t: line + 1 }] });
      files.say({ type: 'lines', segments: [{ ...lines('1.out', line + 1, line + 2), t: line + 12 }] });
    }
    await open();
    click(/^Side by side/);
    await settled();
    const scrollers = [...element.querySelectorAll<HTMLElement>('.td-log-column .td-logs-scroll')];
    expect(texts(0).at(-1)).toBe('line  299');
    scrollers[0]!.scrollTop = 100 * 19;
    scrollers[0]!.dispatchEvent(new Event('scroll'));
    expect(texts(0).slice(6, 8)).toEqual(['line  100', 'line  101']);
    expect(texts(1).slice(6, 8)).toEqual(['line   90', 'line   91']);
    expect(element.querySelector('[aria-label^=Follow]')!.getAttribute('aria-pressed')).toBe('false');
    scrollers[1]!.dispatchEvent(new KeyboardEvent('keydown', { key: 'End', bubbles: true }));
    expect(texts(0).at(-1)).toBe('line  299');
    expect(texts(1).at(-1)).toBe('line  300');
    expect(element.querySelector('[aria-label^=Follow]')!.getAttribute('aria-pressed')).toBe('true');
  });

  test('begins where the reader was, and goes back there', async () => {
    hello(2);
    files.say({ type: 'lines', segments: [lines('1.out', 0, 1)] });
    for (let line = 0; line < 200; line++) {
      files.say({ type: 'lines', segments: [{ ...lines('0.out', line, line + 1), t: line + 5 }] });
    }
    await open();
    scroller().scrollTop = 100 * 19;
    scroller().dispatchEvent(new Event('scroll'));
    expect(rows()[6]).toBe('[rank 0]line  100');
    click(/^Side by side/);
    expect(texts(0)[6]).toBe('line  100');
    click(/^Side by side/);
    expect(rows()[6]).toBe('[rank 0]line  100');
    expect(element.querySelector('[aria-label^=Follow]')!.getAttribute('aria-pressed')).toBe('false');
  });

  test('a search goes to the column of its hit, and a selected column is copied', async () => {
    const written: string[] = [];
    vi.stubGlobal('navigator', { clipboard: { writeText: async (text: string) => void written.push(text) } });
    await eightRanks();
    type('5');
    await settled();
    expect(element.querySelector('[aria-label=search] [role=status]')!.textContent).toBe('1 of 1, newest first');
    expect(element.querySelector('.td-log-column .td-hit-current')!.closest('[aria-label^="rank 5"]')).not.toBeNull();
    const second = element.querySelectorAll<HTMLElement>('.td-log-column .td-logs-scroll')[3]!;
    second.dispatchEvent(new KeyboardEvent('keydown', { key: 'a', ctrlKey: true, bubbles: true }));
    expect(element.querySelectorAll('[aria-selected=true]')).toHaveLength(3);
    click(/^Copy/);
    await settled();
    expect(written).toEqual(['line    0\nline    1\nline    2']);
    vi.unstubAllGlobals();
  });

  test('as many columns as there is room for', () => {
    expect([0, 300, 700, 800, 5000].map(fitting)).toEqual([4, 2, 2, 3, 4]);
  });
});
