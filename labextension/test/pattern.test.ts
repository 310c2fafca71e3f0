import { describe, expect, test } from 'vitest';

import { patternOf, type LinePattern } from '../src/pattern';

function expression(text: string, heedsCase = true): LinePattern {
  const pattern = patternOf(text, true, heedsCase);
  expect(pattern, text).toBeTypeOf('object');
  expect(pattern, text).not.toBeNull();
  return pattern as LinePattern;
}

test('a text is searched for as it stands', () => {
  const pattern = patternOf('a.b(', false, false) as LinePattern;
  expect(pattern.test('A.B(')).toBe(true);
  expect(pattern.test('axb(')).toBe(false);
  expect(pattern.find('a.b( A.B(')).toEqual([
    [0, 4],
    [5, 9]
  ]);
});

describe('an expression', () => {
  const LINES = [
    ...['', 'a', 'b', 'ab', 'aab', 'abc', 'loss=0.25', 'loss = 1e-3', 'epoch 3/10', 'rank 12: Ab', 'a-b_c d', '  x'],
    ...['ERROR: no', 'error', 'aaaa!', 'é', 'x\ty', '[3]', '{1}', 'a{2}', 'end.', 'aXbXc', '0x1F', 'foo.bar(baz)']
  ];
  const FIXED = [
    ...['a', 'ab|b', 'a*b', '^a', 'b$', '^$', 'a+?b', '(a|aa)+$', '.*=.*', '\\d+/\\d+', '[a-c]+', '[^a-c]', '\\bb\\b'],
    ...['\\Bb', 'x?', 'a{2}', 'a{1,2}b', 'a{2,}', '(?:ab)+c?', 'loss\\s*=\\s*(?<value>[\\d.eE+-]+)', '[\\w-]+_', '\\['],
    ...[
      '[\\]}]',
      '\\x61',
      '\\u0061b',
      'x{1}',
      'a{',
      '[-a]',
      '[a-]',
      'a|',
      '()',
      '[\\d\\s]x',
      '\\S+\\.$',
      '(a*)*b',
      '\\t'
    ]
  ];

  test.each(FIXED)('%s finds what JavaScript finds', source => {
    for (const heedsCase of [true, false]) {
      const [ours, theirs] = [expression(source, heedsCase), new RegExp(source, heedsCase ? '' : 'i')];
      for (const line of LINES) {
        expect([line, ours.test(line)]).toEqual([line, theirs.test(line)]);
      }
    }
  });

  test('any that are put together find what JavaScript finds, and begin where it begins', () => {
    const random = seeded(7);
    const pick = <T>(from: readonly T[]): T => from[Math.floor(random() * from.length)]!;
    const some = (depth: number): string => {
      const inner = (): string => some(depth - 1);
      const atom = (): string => pick(['a', 'b', 'c', '.', '[ab]', '[^a]', '\\w', '\\W', '^', '$', '\\b']);
      const kinds = [atom, () => inner() + inner(), () => `(?:${inner()}|${inner()})`, () => repeat(inner())];
      return depth > 0 ? pick(kinds)() : atom();
    };
    const repeat = (body: string): string => `(?:${body})${pick(['*', '+', '?', '{2}', '{0,2}', '{1,}', '*?'])}`;
    for (let round = 0; round < 1500; round++) {
      const source = some(4);
      const [ours, theirs] = [expression(source, random() < 0.5), new RegExp(source)];
      const line = Array.from({ length: Math.floor(random() * 8) }, () => pick(['a', 'b', 'c', ' '])).join('');
      const found = theirs.exec(line);
      expect([source, line, ours.test(line)]).toEqual([source, line, found !== null]);
      if (found && found[0] !== '') {
        expect([source, line, ours.find(line)[0]?.[0]]).toEqual([source, line, found.index]);
      }
    }
  });

  test('that has more states than are kept finds what JavaScript finds', () => {
    const random = seeded(11);
    const line = Array.from({ length: 20_000 }, () => (random() < 0.5 ? 'a' : 'b')).join('');
    const source = 'a[ab]{12}a[ab]{3}bbab';
    const places = expression(source).find(line);
    expect(places.length).toBeGreaterThan(10);
    expect(places).toEqual([...line.matchAll(new RegExp(source, 'g'))].map(found => [found.index, found.index + 21]));
  });

  test('marks are the longest, one after the other, none of them empty', () => {
    expect(expression('a|ab').find('xabxa')).toEqual([
      [1, 3],
      [4, 5]
    ]);
    expect(expression('b*').find('abba')).toEqual([[1, 3]]);
    expect(expression('$').find('ab')).toEqual([]);
  });

  test('what Python writes otherwise is understood; letters are of every script', () => {
    expect(expression('(?P<x>a)').test('a')).toBe(true);
    expect(expression('(?i)LOSS').test('loss')).toBe(true);
    expect(expression('\\Aé\\Z').test('é')).toBe(true);
    expect(expression('^\\w+$').test('épürée')).toBe(true);
  });

  test('one that is none says why; look-around, references and monsters are left to the feed', () => {
    expect(patternOf('(', true, true)).toContain('regular expression');
    for (const source of ['^(?!.*debug)', '(?<=a)b', '(a)\\1', 'a{100000}', '((a{50}){50}){50}', '(?:){1000000000}']) {
      expect(patternOf(source, true, true), source).toBeNull();
    }
  });

  // JavaScript's own would be at the first of these for longer than anybody waits.
  test.each([
    ['(a|aa)+$', `${'a'.repeat(60_000)}!`, false],
    ['(a+)+$', `${'a'.repeat(60_000)}!`, false],
    ['.*.*.*=.*', 'x'.repeat(60_000), false],
    ['.*.*.*=.*', `${'x'.repeat(60_000)}=`, true],
    ['(x+x+)+y', 'x'.repeat(60_000), false],
    ['(?:a|b)*a(?:a|b){12}c', 'abbab'.repeat(12_000), false]
  ])('%s is soon through a long line', (source, line, there) => {
    const pattern = expression(source);
    expect(pattern.test(line)).toBe(there);
    expect(pattern.find(line.slice(0, 4000)).length).toBeLessThanOrEqual(1);
  });
});

/** Numbers that are the same each time (mulberry32). */
function seeded(state: number): () => number {
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}
