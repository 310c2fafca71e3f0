import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';
import { CUT, GAP } from '../src/logrows';
import { LogStore } from '../src/logstore';
import { cutAfter, foldOpen, foldReturns, indexAt, plain } from '../src/logtext';
import { patternOf, type LinePattern } from '../src/pattern';
import type { LogFilter, LogView } from '../src/logview';
import type { Segment } from '../src/source';

const pattern = (text: string): LinePattern => patternOf(text, false, false) as LinePattern;
const ALL: LogFilter = { ranks: null, stream: null, pattern: null, alike: 0, folds: new Map() };
const never = new AbortController().signal;
const bytes = (text: string): number => Buffer.byteLength(text, 'utf8');

/** A segment of `text` from byte `start` on. */
function segment(file: string, start: number, text: string, t: number | null = 1): Segment {
  return { file, start, end: start + bytes(text), t, text };
}

function shown(store: LogStore, view: LogView): string[] {
  return [...view.rows.view()].map(row => {
    const { kind, bytes, start } = store.rows;
    return kind[row] === GAP ? `<${bytes[row]} at ${start[row]}>` : `${store.fileOf(row).name} ${store.text(row)}`;
  });
}

/** Time in which each look at the clock takes a second: no choice is made in one slice, however fast the machine is. */
let seconds = 0;
beforeEach(() => void vi.spyOn(performance, 'now').mockImplementation(() => 1000 * seconds++));
afterEach(() => void vi.restoreAllMocks());

/** When a choice among very many lines is shown. */
function chosen(view: LogView): Promise<void> {
  return new Promise(resolve => (view.ready = resolve));
}

function lines(store: LogStore, filter: LogFilter = ALL): string[] {
  return shown(store, store.view(filter, never));
}

describe('live lines', () => {
  test('stand in the order they came in, whatever their file', () => {
    const store = new LogStore();
    store.append([segment('0.out', 0, 'a\nb\n', 2), segment('1.err', 0, 'c\n', 1)]);
    store.append([segment('0.out', 4, 'd\n\n', 3)]);
    expect(lines(store)).toEqual(['0.out a', '0.out b', '1.err c', '0.out d', '0.out ']);
    expect(store.offsets()).toEqual({ '0.out': 7, '1.err': 2 });
  });

  test('a repeated or overlapping segment adds nothing twice', () => {
    const store = new LogStore();
    store.append([segment('0.out', 0, 'äö\nb\n'), segment('0.out', 0, 'äö\nb\n'), segment('0.out', 5, 'b\nc\n')]);
    store.append([segment('0.out', 7, 'c\n')]);
    expect(lines(store)).toEqual(['0.out äö', '0.out b', '0.out c']);
  });

  test('what was passed over is a row that says how much', () => {
    const store = new LogStore();
    store.append([segment('0.out', 0, 'a\n'), segment('0.out', 1000, 'b\n')]);
    expect(lines(store)).toEqual(['0.out a', '<998 at 2>', '0.out b']);
    expect(store.hasGaps() && !store.holds('0.out', 500) && store.holds('0.out', 1001)).toBe(true);
  });

  test('a line in several segments is one line', () => {
    const store = new LogStore();
    const view = store.view(ALL, never);
    store.append([segment('0.out', 0, 'one '), segment('1.out', 0, 'other\n')]);
    store.append([segment('0.out', 4, 'two '), segment('0.out', 8, 'three\nnext\n')]);
    expect(shown(store, view)).toEqual(['0.out one two three', '1.out other', '0.out next']);
    expect(store.rows.bytes[view.rows.at(0)]).toBe(14);
  });

  test('a line beyond the limit is cut, and knows how long it is', () => {
    const store = new LogStore({ line: 100 });
    for (let i = 0; i < 10; i++) {
      store.append([segment('0.out', i * 64, 'x'.repeat(64))]);
    }
    store.append([segment('0.out', 640, '\nnext\n')]);
    const view = store.view(ALL, never);
    const row = view.rows.at(0);
    expect([store.rows.kind[row], store.rows.bytes[row], store.text(row).length]).toEqual([CUT, 641, 100]);
    expect(shown(store, view)[1]).toBe('0.out next');
  });

  test('10 MB in one line are held whole', () => {
    const store = new LogStore();
    const piece = 'y'.repeat(64 * 1024);
    for (let i = 0; i < 160; i++) {
      store.append([segment('0.out', i * piece.length, piece)]);
    }
    expect(store.text(store.order.at(0)).length).toBe(160 * piece.length);
  });

  test('names that are no files, and unknown times, do no harm', () => {
    const store = new LogStore();
    store.append([segment('../etc', 0, 'x\n'), segment('0.out', 0, 'a\n', null), segment('0.out', 2, '', null)]);
    expect(lines(store)).toEqual(['0.out a']);
  });
});

describe('carriage returns', () => {
  test('a bar is one line, over segment borders too', () => {
    const store = new LogStore();
    const view = store.view(ALL, never);
    const pieces = ['start\n', '\r 10%', '|#  |\r 2', '0%|## |\r', ' 30%|###|\r\n', 'end\r\n'];
    let start = 0;
    for (const piece of pieces) {
      store.append([segment('0.err', start, piece)]);
      start += piece.length;
    }
    expect(shown(store, view)).toEqual(['0.err start', '0.err  30%|###|', '0.err end']);
  });

  // What tqdm writes for an outer bar and an inner one with leave=False.
  const inner = (percent: number): string => `\n\rinner ${percent}%\x1b[A`;
  const outer = (percent: number): string => `\n\r           \x1b[A\router ${percent}%`;
  const NESTED = `\router 0%${inner(0)}${inner(50)}${outer(50)}${inner(0)}${inner(100)}${outer(100)}\nend\nlast\n`;

  test.each([1, 7, 10, 16, 1000])('bars inside one another are one line each, in pieces of %i', size => {
    // An escape sequence is never cut: the feed gives whole lines, and the rest of one only later.
    const parts = NESTED.match(/\x1b\[A|[^]/g)!;
    const store = new LogStore();
    const view = store.view(ALL, never);
    const seen = new Set<string>();
    let start = 0;
    for (let i = 0; i < parts.length; i += size) {
      const text = parts.slice(i, i + size).join('');
      store.append([segment('0.err', start, text)]);
      start += text.length;
      const now = shown(store, view).map(line => line.trimEnd());
      seen.add(now.join('|'));
      expect(now.filter(line => line.includes('outer')).length).toBeLessThan(2);
    }
    expect(shown(store, view)).toEqual(['0.err outer 100%', '0.err end', '0.err last']);
    expect(store.rows.bytes[0]! + store.rows.bytes[1]! + store.rows.bytes[2]!).toBe(NESTED.length);
    if (size === 1) {
      expect([...seen]).toContain('0.err outer 50%|0.err inner 0%');
    }
    expect(lines(store)).toEqual(shown(store, view));
  });

  test('older bars inside one another are one line each', () => {
    const store = new LogStore();
    const text = `first\n${NESTED}`;
    store.append([segment('0.err', text.length, 'new\n')]);
    store.insert([segment('0.err', 0, text)]);
    expect(lines(store)).toEqual(['0.err first', '0.err outer 100%', '0.err end', '0.err last', '0.err new']);
  });

  test('bars that began alike on all ranks are apart when they go on', () => {
    const store = new LogStore();
    const view = store.view({ ...ALL, alike: 2 }, never);
    store.append([segment('0.err', 0, '\router 0%\n'), segment('1.err', 0, '\router 0%\n')]);
    expect(shown(store, view)).toEqual(['0.err outer 0%']);
    store.append([segment('1.err', 10, '\rinner 0%\x1b[A\router 9%\n')]);
    expect(shown(store, view)).toEqual(['0.err outer 0%', '1.err outer 9%', '1.err inner 0%']);
  });

  test('thousands of bars take the room of one', () => {
    const store = new LogStore();
    let start = 0;
    for (let i = 0; i < 2000; i++) {
      const text = `\r${i}: ${'#'.repeat(60)}`;
      store.append([segment('0.err', start, text)]);
      start += text.length;
    }
    expect(store.length).toBe(1);
    expect(store.rows.characters).toBeLessThan(400);
    expect(store.text(0)).toMatch(/^1999: #+$/);
  });

  test.each([
    ['abc\rde', 'dec'],
    ['abc\r', 'abc'],
    ['\r\rabc', 'abc'],
    ['long one\r\x1b[Kx', '\x1b[Kx'],
    ['\x1b[31mabcdef\rxy', 'xy\x1b[0m\x1b[31mcdef']
  ])('%j reads %j', (written, read) => {
    expect(foldReturns(written)).toBe(read);
    expect(plain(foldReturns(foldOpen(written)))).toBe(plain(read));
  });

  test('an escape that is cut between two segments is whole again', () => {
    const store = new LogStore();
    store.append([segment('0.out', 0, 'a\x1b[3'), segment('0.out', 4, '1mred\n')]);
    expect(store.text(0)).toBe('a\x1b[31mred');
  });
});

describe('lines that were asked for', () => {
  test('older ones go in front, merged by time', () => {
    const store = new LogStore();
    store.append([
      segment('0.out', 10, 'late\n', 50),
      segment('1.out', 10, 'early\n', 20),
      segment('1.out', 16, 'x\n', 60)
    ]);
    store.insert([
      segment('1.out', 0, 'one\ntwo..\n', 10),
      segment('0.out', 0, 'zero1\n', 30),
      segment('0.out', 6, 'z2.\n', 40)
    ]);
    expect(lines(store)).toEqual([
      '1.out one',
      '1.out two..',
      '0.out zero1',
      '0.out z2.',
      '0.out late',
      '1.out early',
      '1.out x'
    ]);
    expect(store.starts()).toEqual({ '0.out': 0, '1.out': 0 });
  });

  test('an island leaves a gap, and the gap can be filled from any side', () => {
    const store = new LogStore();
    const text = Array.from({ length: 10 }, (_, i) => `line ${i}\n`);
    store.append([segment('0.out', 63, text.slice(9).join(''), 9)]);
    store.insert([segment('0.out', 14, text[2]!, 3)]);
    expect(lines(store)).toEqual(['0.out line 2', '<42 at 21>', '0.out line 9']);
    store.insert([segment('0.out', 42, text[6]!, 6)]);
    expect(lines(store)).toEqual(['0.out line 2', '<21 at 21>', '0.out line 6', '<14 at 49>', '0.out line 9']);
    store.insert([segment('0.out', 0, text.join(''), 5)]);
    expect(lines(store)).toEqual(text.map(line => `0.out ${line.trimEnd()}`));
    expect(store.hasGaps()).toBe(false);
    expect(store.find('0.out', 45)).toBe(store.order.at(6));
  });

  test('the front of a line that began before what is held is joined to it', () => {
    const store = new LogStore();
    store.append([segment('0.out', 100, 'end of it\nnext\n')]);
    store.insert([segment('0.out', 90, 'w\nmiddle, ')]);
    expect(lines(store)).toEqual(['0.out w', '0.out middle, end of it', '0.out next']);
  });

  test('an empty answer changes nothing', () => {
    const store = new LogStore();
    store.append([segment('0.out', 5, 'a\n')]);
    store.insert([]);
    expect(lines(store)).toEqual(['0.out a']);
  });
});

describe('limits', () => {
  test('of each rank the oldest go, and can be asked for again', () => {
    const store = new LogStore({ rank: 100 });
    const view = store.view(ALL, never);
    store.append([segment('1.out', 0, 'keep\n')]);
    for (let i = 0; i < 1000; i++) {
      store.append([segment('0.out', i * 8, `${String(i).padStart(7)}\n`)]);
    }
    expect(store.length).toBeLessThanOrEqual(106);
    expect(shown(store, view)[0]).toBe('1.out keep');
    const first = store.starts()['0.out']!;
    expect(shown(store, view)[1]).toBe(`0.out ${String(first / 8).padStart(7)}`);
    expect(store.rows.capacity).toBe(1024);
    store.reading = true;
    store.insert([segment('0.out', first - 8, `${String(first / 8 - 1).padStart(7)}\n`)]);
    expect(shown(store, view)).toHaveLength(store.length);
  });

  test('of all ranks together, in lines and in characters', () => {
    const store = new LogStore({ all: 50 });
    const text = new LogStore({ characters: 1000 });
    for (let i = 0; i < 200; i++) {
      store.append([segment(`${i % 4}.out`, Math.floor(i / 4) * 2, 'x\n')]);
      text.append([segment('0.out', i * 50, 'y'.repeat(49) + '\n')]);
    }
    expect(store.length).toBeLessThanOrEqual(53);
    expect(text.rows.characters).toBeLessThanOrEqual(1100);
  });

  test('a million lines are held and chosen from', async () => {
    const store = new LogStore({ rank: 2_000_000 });
    const text = Array.from({ length: 2000 }, (_, i) => `step ${i} loss 0.125 and so on\n`).join('');
    for (let i = 0; i < 500; i++) {
      store.append([segment(`${i % 2}.out`, Math.floor(i / 2) * text.length, text, i)]);
    }
    expect(store.length).toBe(1_000_000);
    const view = store.view({ ...ALL, pattern: pattern('step 1999 ') }, never);
    expect(view.length).toBe(1);
    await chosen(view);
    expect(view.length).toBe(500);
  });
});

describe('a choice among very many lines', () => {
  const text = Array.from({ length: 1000 }, (_, i) => `step ${i} of the job\n`).join('');

  /** Lines of four ranks that say the same. */
  function many(store: LogStore): void {
    for (let i = 0; i < 400; i++) {
      store.append([segment(`${i % 4}.out`, Math.floor(i / 4) * text.length, text, i)]);
    }
  }

  test('leaves what was shown until it is there', async () => {
    const store = new LogStore();
    many(store);
    const view = store.view(ALL, never);
    await chosen(view);
    const { edits } = view;
    view.choose({ ...ALL, ranks: new Set([3]), pattern: pattern('step 77 ') });
    expect(view.length).toBe(400_000);
    await chosen(view);
    expect(view.length).toBe(100);
    expect(view.edits).toBeGreaterThan(edits);
  });

  test('heeds what happens meanwhile', async () => {
    const store = new LogStore({ rank: 120_000 });
    many(store);
    const view = store.view({ ...ALL, alike: 4 }, never);
    const end = 100 * text.length;
    store.append([segment('0.out', end, 'step 77 has no en')]);
    store.append([segment('0.out', end + 17, 'd\n')]);
    for (let i = 0; i < 30; i++) {
      store.append([segment('1.out', end + i * text.length, text, 400 + i)]);
    }
    await chosen(view);
    store.append([segment('0.out', end + 19, 'step 77 at last\n', 500)]);
    const other = store.view({ ...ALL, alike: 4 }, never);
    await chosen(other);
    expect(store.length).toBeLessThan(430_000);
    expect(shown(store, view).join('\n')).toBe(shown(store, other).join('\n'));
    expect(shown(store, view).filter(line => line.startsWith('0.out step 77 '))).toHaveLength(102);
  });

  test('the newer of two choices is the one that is shown', async () => {
    const store = new LogStore();
    many(store);
    const view = store.view(ALL, never);
    view.choose({ ...ALL, ranks: new Set([1]) });
    view.choose({ ...ALL, ranks: new Set([2]), pattern: pattern('step 5 ') });
    await chosen(view);
    expect(new Set(shown(store, view))).toEqual(new Set(['2.out step 5 of the job']));
  });
});

describe('a choice of lines', () => {
  test('by rank, stream and pattern, and kept up to date', () => {
    const store = new LogStore();
    const view = store.view(
      { ranks: new Set([1]), stream: 'err', pattern: pattern('LOSS'), alike: 0, folds: new Map() },
      never
    );
    store.append([segment('1.err', 0, 'LOSS 1\n'), segment('1.out', 0, 'loss\n'), segment('0.err', 0, 'loss\n')]);
    store.append([segment('1.err', 7, 'los')]);
    expect(shown(store, view)).toEqual(['1.err LOSS 1']);
    store.append([segment('1.err', 10, 's 2\n')]);
    expect(shown(store, view)).toEqual(['1.err LOSS 1', '1.err loss 2']);
    view.choose(ALL);
    expect(view.length).toBe(4);
  });

  test('colours are not searched, words between them are', () => {
    const store = new LogStore();
    store.append([segment('0.out', 0, '\x1b[31mlo\x1b[0mss 31\n')]);
    expect(['loss', '31m'].map(text => lines(store, { ...ALL, pattern: pattern(text) }).length)).toEqual([1, 0]);
  });

  test('what all ranks say at about the same time is one row', () => {
    const store = new LogStore();
    const view = store.view({ ...ALL, alike: 3 }, never);
    const said = (rank: number, start: number, text: string, t: number): Segment =>
      segment(`${rank}.out`, start, text, t);
    store.append([said(0, 0, 'hello\n', 1), said(1, 0, 'hello\n', 1)]);
    expect(view.length).toBe(2);
    store.append([said(2, 0, 'mine\nhello\n', 2), said(0, 6, 'hello\n', 3)]);
    expect(shown(store, view)).toEqual(['0.out hello', '2.out mine', '0.out hello']);
    expect([0, 1, 2].map(index => view.isOfAll(view.rows.at(index)))).toEqual([true, false, false]);
    store.append([said(1, 6, 'hello\n', 60), said(2, 11, 'hello\n', 60)]);
    expect(view.length).toBe(5);
    view.choose({ ...ALL, alike: 0 });
    expect(view.length).toBe(7);
    view.choose({ ...ALL, alike: 3 });
    expect(view.length).toBe(5);
  });

  test('a folded line is shown again when the row that stood for it is dropped', () => {
    const store = new LogStore({ rank: 10 });
    const view = store.view({ ...ALL, alike: 2 }, never);
    store.append([segment('0.out', 0, 'same\n'), segment('1.out', 0, 'same\n')]);
    expect(shown(store, view)).toEqual(['0.out same']);
    store.append([segment('0.out', 5, Array.from({ length: 20 }, (_, i) => `${i}\n`).join(''))]);
    expect(shown(store, view)[0]).toBe('1.out same');
  });

  test('one line over and over is no slow search for its likes', () => {
    const store = new LogStore();
    const view = store.view({ ...ALL, alike: 2 }, never);
    store.append([segment('0.out', 0, '\n'.repeat(50_000))]);
    expect(view.length).toBe(50_000);
  });
});

describe('bytes and characters', () => {
  test('a place in bytes is one in characters, emoji and bytes that are no UTF-8 included', () => {
    expect(indexAt('aä😀b', 7, 8)).toBe(4);
    expect(indexAt('aä😀b', 4, 8)).toBe(2);
    // Two bytes that were no UTF-8, shown as eight characters.
    expect(indexAt('\\xff\\xfe\nnext', 3, 7)).toBe(9);
  });

  test('a line after bytes that are no UTF-8 has its true place', () => {
    const store = new LogStore();
    store.append([{ file: '0.out', start: 0, end: 8, t: 1, text: '\\xff\\xfe\nnext\n' }]);
    expect([...store.rows.start.slice(0, 2)]).toEqual([0, 3]);
  });
});

test('a long segment is cut behind whole lines, and no byte is lost', () => {
  for (const unit of ['short\n', 'a much longer line\n', '漢字 \u{1f600}\n', 'damaged \\xff\n', 'no end']) {
    const whole = unit.repeat(50);
    const bytes = new TextEncoder().encode(whole).length - 3 * (whole.match(/\\xff/g)?.length ?? 0);
    let rest: Segment | null = { file: '0.out', start: 7, end: 7 + bytes, t: 1, text: whole };
    const parts: Segment[] = [];
    while (rest) {
      const [part, more] = cutAfter(rest, 100);
      parts.push(part);
      rest = more;
    }
    expect(parts.map(part => part.text).join('')).toBe(whole);
    expect(parts.map(part => part.start)).toEqual([7, ...parts.slice(0, -1).map(part => part.end)]);
    expect(parts.at(-1)!.end).toBe(7 + bytes);
    expect(parts.slice(0, -1).every(part => part.text.endsWith('\n') && part.text.length < 200)).toBe(true);
    const each = unit.endsWith('\n') ? bytes / 50 : bytes;
    expect(parts.every(part => (part.end - part.start) % each === 0)).toBe(true);
  }
});
