import { expect, test } from 'vitest';

import { Pace } from '../src/view/pace';

const of = (n: number, total: number | null) => ({ desc: '', n, total });

test('counts a second of the last seconds, and what is left at that pace', () => {
  const pace = new Pace();
  pace.take(0, 100);
  expect(pace.words(100)).toEqual([]);
  for (let second = 1; second <= 60; second++) {
    pace.take(second < 30 ? second : 30 + (second - 30) * 2.5, 100 + second);
  }
  expect(pace.words(160)).toEqual(['2.5 it/s']);
  expect(pace.words(160, of(105, 605))).toEqual(['2.5 it/s', '3 min 20 s left']);
  expect(pace.words(160, of(105, null))).toEqual(['2.5 it/s']);
});

test('slow steps are counted, and one that hangs comes near nothing', () => {
  const pace = new Pace();
  pace.take(1, 0);
  pace.take(2, 100);
  expect(pace.words(150)).toEqual(['0.01 it/s']);
  expect(pace.words(1100)).toEqual(['0.001 it/s']);
});

test('what begins again is counted anew', () => {
  const pace = new Pace();
  pace.take(90, 0);
  pace.take(100, 1);
  pace.take(0, 2);
  expect(pace.words(2)).toEqual([]);
  pace.take(300, 4);
  expect(pace.words(4)).toEqual(['150 it/s']);
});

test('samples a second, large numbers with their thousands apart', () => {
  const pace = new Pace();
  pace.take(0, 0);
  expect(pace.samples(0)).toEqual([]);
  pace.take(128_000, 10);
  expect(pace.samples(10)).toEqual(['12\u202f800 samples/s']);
});
