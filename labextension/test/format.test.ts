import { afterEach, describe, expect, it } from 'vitest';
import {
  ago,
  duration,
  elapsed,
  number,
  size,
  spans,
  sizeOf,
  startedAt,
  ticking,
  where,
  tickTimes
} from '../src/view/format';
import { translateWith, plural, trans } from '../src/view/translate';
import { aRank, aState, NOW } from './played';

describe('the wording of views.py', () => {
  it.each([
    [0, '0.00 s'],
    [0.05, '0.05 s'],
    [12.34, '12.3 s'],
    [59.94, '59.9 s'],
    [59.96, '1 min 00 s'],
    [245, '4 min 05 s'],
    [3599.6, '1 h 00 min'],
    [11_220, '3 h 07 min'],
    [187_200, '2 d 04 h'],
    [-3, '0.00 s']
  ])('duration(%d) is %s', (seconds, text) => expect(duration(seconds)).toBe(text));

  it.each([
    [0, '0 B'],
    [512, '512 B'],
    [999, '999 B'],
    [1500, '1.5 kB'],
    [256e6, '256 MB'],
    [999_600, '1 MB'],
    [5.25e15, '5250 TB']
  ])('size(%d) is %s', (bytes, text) => expect(size(bytes)).toBe(text));

  it.each([
    [12e9, 80e9, '12 of 80 GB'],
    [3.25e9, 85.9e9, '3.25 of 85.9 GB'],
    [900e6, 80e9, '900 MB of 80 GB'],
    [0, 80e9, '0 B of 80 GB']
  ])('sizeOf(%d, %d) is %s', (part, whole, text) => expect(sizeOf(part, whole)).toBe(text));

  it('times under an axis are as fine as they are apart, and name a new day', () => {
    const noon = new Date(2026, 10, 27, 12, 0, 0).getTime() / 1000;
    expect(tickTimes([noon, noon + 5, noon + 10])).toEqual(['12:00:00', '12:00:05', '12:00:10']);
    expect(tickTimes([noon, noon + 3600])).toEqual(['12:00', '13:00']);
    expect(tickTimes([noon + 6 * 3600, noon + 12 * 3600])).toEqual(['18:00', 'Nov 28']);
    expect(tickTimes([noon, noon + 86400])).toEqual(['Nov 27', 'Nov 28']);
    expect(tickTimes([])).toEqual([]);
  });

  it('ago counts in the largest unit, and a clock set back reads as now', () => {
    expect([3, 59, 3700, 200_000].map(passed => ago(NOW - passed, NOW))).toEqual([
      'just now',
      '59 s ago',
      '1 h ago',
      '2 d ago'
    ]);
    expect(ago(NOW + 100, NOW)).toBe('just now');
  });

  it('where names one host and counts several', () => {
    expect(where(aState([aRank(0)]))).toBe('1 rank on box');
    expect(where(aState([aRank(0), aRank(1, { host: 'other' })]))).toBe('2 ranks on 2 hosts');
    expect(where(aState([], { world_size: 4 }))).toBe('4 ranks');
  });

  it('elapsed ends with the job', () => {
    expect(elapsed(aState([], { ended: NOW + 9 }), NOW + 100)).toBe(9);
    expect(elapsed(aState([]), NOW - 5)).toBe(0);
    expect(ticking(12.9)).toBe('12 s');
  });
});

describe('numbers', () => {
  it.each([
    [0.123456, '0.1235'],
    [1234.5678, '1235'],
    [1e-7, '1e-7'],
    [1.23456e-5, '1.235e-5'],
    [1e308, '1e308'],
    [12345678, '12\u202f345\u202f678'],
    [NaN, 'NaN'],
    [Infinity, '∞'],
    [-Infinity, '−∞'],
    [2n ** 70n, '1.181e21']
  ])('%d is %s', (value, text) => expect(number(value).replace('e+', 'e')).toBe(text));

  it('consecutive ranks are a span', () => {
    expect(spans([0, 1, 2, 3])).toBe('0-3');
    expect(spans([0, 2, 5, 6])).toBe('0, 2, 5, 6');
    expect(spans([])).toBe('');
  });
});

describe('translation', () => {
  afterEach(() => translateWith(null));

  it('fills in arguments, once', () => {
    expect(trans('%1 on %2', '%2', 'box')).toBe('%2 on box');
    expect(plural('%1 rank', '%1 ranks', 1)).toBe('1 rank');
  });

  it('can be replaced', () => {
    translateWith({ one: () => 'eins', many: () => 'viele', language: 'de' });
    expect([trans('one'), plural('one', 'many', 2)]).toEqual(['eins', 'viele']);
  });
});

describe('when a job began', () => {
  const at = (...parts: [number, number, number, number, number, number]) => new Date(...parts).getTime() / 1000;
  const now = at(2026, 10, 22, 15, 0, 0);
  it.each([
    [at(2026, 10, 22, 14, 3, 7), '14:03:07'],
    [at(2026, 10, 21, 14, 3, 7), 'Nov 21, 14:03'],
    [at(2025, 10, 21, 14, 3, 7), 'Nov 21, 2025, 14:03']
  ])('is said as shortly as can be', (then, words) => {
    expect(startedAt(then, now)).toBe(words);
  });

  it('is said in the form of the words’ language', () => {
    translateWith({ one: () => '', many: () => '', language: 'de' });
    expect(startedAt(at(2026, 10, 21, 14, 3, 7), now)).toBe('21. Nov., 14:03');
    translateWith(null);
  });
});
