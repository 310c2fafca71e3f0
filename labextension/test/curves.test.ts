import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { aPage, aRank, aSeries, aState, event, find, frames, hello, played, status, type PlayedFeed } from './played';
import type { Answers } from '../src/source';
import { CurvesTab, PAGE } from '../src/view/curves';
import { legendOf } from '../src/view/curvebar';
import { keyRange, tellSpread } from '../src/view/curvecard';
import { csvText, saveCsv, svgText } from '../src/view/export';
import { readings, summary, themeOf, type Look } from '../src/view/plot';
import {
  matching,
  padded,
  picture,
  smoothed,
  notFiniteSince,
  spreadAtEnd,
  spreadOfRanks,
  unscaled,
  type Picture
} from '../src/view/series';

/** A busy machine takes its time. */
const PATIENT = { timeout: 20_000 };

const theme = themeOf(document.body);
const look: Look = { log: false, time: false, theme, width: 300, height: 150, together: null };

function finite(values: (number | null | undefined)[]): boolean {
  return values.every(value => value === null || value === undefined || Number.isFinite(value));
}

describe('points', () => {
  it('has gaps for what is no finite number', () => {
    const y = [1, NaN, Infinity, -Infinity, 2];
    const shown = picture([aSeries('loss', { x: [0, 1, 2, 3, 4], y, low: y, high: y })], 0.5, false);
    expect(shown.lines[0]!.y).toEqual([1, null, null, null, 2]);
    expect(finite(shown.lines[0]!.smooth!)).toBe(true);
    expect(shown.holes).toBe(3);
  });

  it('bears 1e308 beside -1e308', () => {
    const y = [1e308, -1e308, 0];
    const shown = picture([aSeries('loss', { y, low: y, high: y })], 0, false);
    expect(shown.power).toBe(308);
    expect(finite(shown.lines[0]!.y)).toBe(true);
    const [low, high] = padded(-1, 1);
    expect(high - low).toBeLessThan(3);
    expect(unscaled(shown.lines[0]!.y[0]!, shown.power)).toBe('1e308');
    expect(svgText('loss', shown, look)).not.toMatch(/NaN|Infinity/);
  });

  it('bears the smallest numbers', () => {
    const y = [5e-324, 1e-310, 0];
    const shown = picture([aSeries('loss', { y, low: y, high: y })], 0, true);
    expect(finite(shown.lines[0]!.y)).toBe(true);
  });

  it('has no place for values at or below 0 on a log axis', () => {
    const y = [1, 0, -1];
    expect(picture([aSeries('loss', { y, low: y, high: y })], 0, true).lines[0]!.y).toEqual([1, null, null]);
  });

  it('puts steps that went backwards, or that are none, in order', () => {
    const steps = { x: [5, 1, NaN, 3], y: [50, 10, 0, 30], low: [50, 10, 0, 30], high: [50, 10, 0, 30] };
    const shown = picture([aSeries('loss', steps)], 0, false);
    expect(shown.x).toEqual([1, 3, 5]);
    expect(shown.lines[0]!.y).toEqual([10, 30, 50]);
  });

  it('gives ranks with different steps one x, without gaps between', () => {
    const one = aSeries('loss', { rank: 0, x: [0, 2], y: [1, 3], low: [1, 3], high: [1, 3] });
    const other = aSeries('loss', { rank: 1, x: [1], y: [2], low: [2], high: [2] });
    const shown = picture([one, other], 0, false);
    expect(shown.x).toEqual([0, 1, 2]);
    expect(shown.lines.map(line => line.y)).toEqual([
      [1, undefined, 3],
      [undefined, 2, undefined]
    ]);
    expect(readings(shown, 1, look).map(reading => reading.text)).toEqual(['step 1', 'rank 0: 1', 'rank 1: 2']);
  });

  it('smooths without being drawn to zero', () => {
    expect(smoothed([5, 5, null, 5], 0.9).map(value => value && Number(value.toFixed(9)))).toEqual([5, 5, null, 5]);
  });

  it('is empty without points, and a flat curve has room', () => {
    expect(picture([], 0, false).x).toEqual([]);
    expect(padded(null, null)).toEqual([0, 1]);
    expect(padded(3, 3)[0]).toBeLessThan(3);
  });

  it('reads as a sentence', () => {
    expect(summary('loss', picture([aSeries('loss')], 0, false), false)).toBe('loss: 0.25 at step 2, from 0.25 to 1');
  });
});

describe('what ranks have in common', () => {
  const band = (low: number[], high: number[], exact = true) =>
    picture([aSeries('loss', { y: [1, 2, 3], low, high })], 0, false, exact);

  it('is one value, or from where to where', () => {
    expect(spreadAtEnd(band([1, 2, 3], [1, 2, 3]))).toEqual({ low: 3, high: 3, mean: 3 });
    expect(spreadAtEnd(band([1, 2, 2.5], [1, 2, 3.5]))).toEqual({ low: 2.5, high: 3.5, mean: 3 });
    // The value and its range are those of one step.
    expect(spreadAtEnd(band([1, 1.5, 3], [1, 2.5, 3]))).toEqual({ low: 3, high: 3, mean: 3 });
    expect(spreadAtEnd(band([NaN, NaN, NaN], [NaN, NaN, NaN]))).toBeNull();
    expect(spreadAtEnd(band([1, 2, 2.5], [1, 2, 3.5], false))).toBeNull();
    expect(spreadAtEnd(picture([aSeries('loss', { rank: 0 })], 0, false, true))).toBeNull();
  });

  it('is known of last values at one step', () => {
    const ranks = (...last: [number, number][]) =>
      Object.fromEntries(last.map(([step, loss], rank) => [String(rank), { step, last: { loss } }]));
    expect(spreadOfRanks(ranks([3, 1], [3, 2], [3, 0.5]), 'loss')).toEqual({ low: 0.5, high: 2, mean: 3.5 / 3 });
    expect(spreadOfRanks(ranks([3, 1], [3, 1]), 'loss')).toEqual({ low: 1, high: 1, mean: 1 });
    expect(spreadOfRanks(ranks([3, 1], [4, 2]), 'loss')).toBeNull();
    expect(spreadOfRanks(ranks([3, 1], [3, NaN]), 'loss')).toBeNull();
    expect(spreadOfRanks(ranks([3, 1]), 'loss')).toBeNull();
    expect(spreadOfRanks(ranks([3, 1], [3, 1]), 'lr')).toBeNull();
  });

  it('knows since when there is no number', () => {
    expect(notFiniteSince({ x: [1, 2, 3], y: [1, NaN, 2] })).toBeNull();
    expect(notFiniteSince({ x: [1, 2, 3], y: [1, NaN, Infinity] })).toBe(2);
    expect(notFiniteSince({ x: [], y: [] })).toBeNull();
    // Of one rank only.
    expect(notFiniteSince({ x: [1, 2, 2, 3, 3], y: [1, 1, NaN, 1, NaN] })).toBe(2);
    expect(notFiniteSince({ x: [1, 1, 2], y: [1, NaN, 1] })).toBeNull();
  });

  it('is said under the cursor', () => {
    const said = (shown: Picture, at: number) => readings(shown, at, look)[1]!.text;
    const shown = band([1, 2, 2.5], [1, 2, 3.5]);
    expect(said(shown, 1)).toBe('all ranks: 2');
    expect(said(shown, 2)).toBe('mean: 3  ≠ 2.5 … 3.5');
    expect(said(band([1, 2, 2.5], [1, 2, 3.5], false), 2)).toBe('mean: 3  2.5 … 3.5');
  });

  it('is said beside the last value, and stays while nobody knows', () => {
    const element = document.createElement('span');
    tellSpread(element, { low: 2.5, high: 3.5, mean: 2.5 }, 0);
    expect(element.textContent).toBe('≠ 2.5 … 3.5');
    expect(element.title).toBe('The ranks differ: the last values are from 2.5 to 3.5');
    tellSpread(element, null, 0);
    expect(element.textContent).toBe('≠ 2.5 … 3.5');
    tellSpread(element, { low: 1, high: 2, mean: 1 }, 300);
    expect(element.textContent).toBe('≠ 1e300 … 2e300');
    tellSpread(element, { low: 1, high: 1, mean: 1 }, 0);
    expect(element.textContent).toBe('');
    expect(element.title).toBe('');
  });
});

describe('files', () => {
  it('quotes names and rounds nothing', () => {
    const y = [0.1 + 0.2];
    const text = csvText([aSeries('a,"b"', { rank: 3, x: [1], y, low: y, high: [NaN] })], 'step');
    expect(text).toBe('name,rank,step,value,low,high\n"a,""b""",3,1,0.30000000000000004,0.30000000000000004,NaN\n');
  });

  it.each(['=1+1', '+1', '-1', '@sum', '\tx'])('makes no formula of the name %s', name => {
    const text = csvText([aSeries(name, { rank: 0, x: [1], y: [2], low: [2], high: [2] })], 'step');
    expect(text.split('\n')[1]).toMatch(/^"?'/);
  });

  it('escapes names in a picture', () => {
    const text = svgText('<script>alert(1)</script>&\u0000', picture([aSeries('x')], 0.5, false), look);
    const parsed = new DOMParser().parseFromString(text, 'image/svg+xml');
    expect(parsed.querySelector('parsererror, script')).toBeNull();
    expect(parsed.querySelector('text')!.textContent).toBe('<script>alert(1)</script>&\ufffd');
  });
});

describe('a file of all points', () => {
  const saved: string[] = [];
  const said: string[] = [];

  beforeEach(() => {
    saved.length = said.length = 0;
    URL.createObjectURL = () => 'blob:a';
    URL.revokeObjectURL = () => undefined;
    vi.spyOn(HTMLAnchorElement.prototype, 'click').mockImplementation(function (this: HTMLAnchorElement) {
      saved.push(this.download);
    });
  });

  afterEach(() => vi.restoreAllMocks());

  function answer(complete: boolean): (curve: { name: string }) => Promise<Answers['curves']> {
    return async ({ name }) => ({ version: 1, complete: complete || name !== 'b', series: [aSeries(name)] });
  }

  const curves = [{ name: 'a' }, { name: 'b' }];
  const say = (words: string) => void said.push(words);

  it('says nothing more where it is complete', async () => {
    await saveCsv('night', curves, answer(true), 'step', say);
    expect([saved, said]).toEqual([['night.csv'], ['reading a…', 'reading b…', '']]);
  });

  it('says that points stand merged', async () => {
    await saveCsv('night', curves, answer(false), 'step', say);
    expect(saved).toEqual(['night.csv']);
    expect(said.at(-1)).toMatch(/^written; points that were too many stand merged/);
  });

  it('is not written where a curve cannot be read, and says why', async () => {
    const points = async (curve: { name: string }) => {
      if (curve.name === 'b') {
        throw new Error('the file is gone');
      }
      return answer(true)(curve);
    };
    await saveCsv('night', curves, points, 'step', say);
    expect([saved, said.at(-1)]).toEqual([[], 'No file was written: the file is gone']);
  });
});

describe('names', () => {
  it('bounds a million', () => {
    const names = Array.from({ length: 1_000_000 }, (_, index) => `layer.${index}.grad`);
    const found = matching(names, 'LAYER .999', 10);
    expect(found.names).toHaveLength(10);
    expect(found.count).toBeGreaterThan(1000);
  });
});

describe('keys', () => {
  it('zoom and move', () => {
    expect(keyRange('+', [0, 8])).toEqual([2, 6]);
    expect(keyRange('ArrowRight', [0, 8])).toEqual([2, 10]);
    expect(keyRange('Escape', [0, 8])).toBeNull();
    expect(keyRange('a', [0, 8])).toBeUndefined();
  });
});

describe('the tab', () => {
  const page = aPage();

  afterEach(() => {
    vi.restoreAllMocks();
    vi.unstubAllGlobals();
  });

  /** jsdom has neither layout nor a canvas: what uPlot calls while it draws. */
  function drawsNothing(): void {
    const context = new Proxy({}, { get: () => () => ({ width: 0 }), set: () => true });
    vi.spyOn(HTMLCanvasElement.prototype, 'getContext').mockReturnValue(context as never);
    vi.stubGlobal('Path2D', function () {
      return context;
    });
  }

  /** With points of this version. */
  function answers(feed: PlayedFeed, version: number): void {
    feed.answer = asked =>
      asked.what === 'curves' ? { version, complete: true, series: asked.names.map(name => aSeries(name)) } : null;
  }

  /** New points, which answers are of. */
  function grows(feed: PlayedFeed, version: number, names: string[]): void {
    answers(feed, version);
    feed.say(status({ curves: { version, names, note: '' } }));
  }

  async function tab(names: string[]): Promise<{ feed: PlayedFeed; tab: CurvesTab }> {
    const { feed, session } = await played(page.signal, hello(aState([aRank(0), aRank(1)])));
    answers(feed, 1);
    feed.say(status({ curves: { version: 1, names, note: '' } }));
    await frames();
    const shown = new CurvesTab(page.root, session, page.signal);
    shown.show();
    return { feed, tab: shown };
  }

  it('says what to do when there are none', async () => {
    const { feed } = await tab([]);
    expect(find(page.root, '.td-empty').textContent).toMatch(
      /^No curves yet\. .*td\.log\(loss=loss\).*import jupyter_torchdist as td/
    );
    feed.say(event(2, 'job.ended', { state: 'succeeded', reason: '' }));
    feed.say(status({ curves: { version: 2, names: [], note: '' } }));
    await vi.waitFor(() => expect(find(page.root, '.td-empty').textContent).toContain('No curve was logged.'), PATIENT);
  });

  it('keeps the ends of long names, where they differ, in sight', async () => {
    const names = ['train/epoch/of/a/model/loss', 'train/epoch/of/a/model/lr', 'acc'];
    await tab(names);
    await vi.waitFor(() => expect(page.root.querySelectorAll('.td-curve-name')).toHaveLength(3), PATIENT);
    const shown = [...page.root.querySelectorAll('.td-curve-name')];
    expect(shown.map(name => name.textContent)).toEqual(names);
    // Only the beginning gives way (curves.css).
    const ends = shown.map(name => name.lastElementChild!);
    expect(ends.map(end => end.textContent!.slice(-4))).toEqual(['loss', 'l/lr', 'acc']);
    expect(shown.map(name => name.querySelector('.td-curve-begin') !== null)).toEqual([true, true, false]);
    expect(ends.some(end => end.classList.contains('td-curve-begin'))).toBe(false);
  });

  it('asks with the width of the screen, and once for a version', async () => {
    const { feed } = await tab(['loss', 'lr']);
    await vi.waitFor(() => expect(feed.asked('curves')).toHaveLength(1), PATIENT);
    expect(feed.asked('curves')[0]).toMatchObject({
      names: ['loss', 'lr'],
      mode: 'band',
      x: 'step',
      low: null,
      width: 128
    });
    feed.say(status({ curves: { version: 1, names: ['loss', 'lr'], note: '' } }));
    await new Promise(resolve => setTimeout(resolve, 700));
    expect(feed.asked('curves')).toHaveLength(1);
    grows(feed, 2, ['loss', 'lr']);
    await vi.waitFor(() => expect(feed.asked('curves')).toHaveLength(2), PATIENT);
    await new Promise(resolve => setTimeout(resolve, 700));
    expect(feed.asked('curves')).toHaveLength(2);
  });

  it('asks again where the answer is of an older version: a feed that was opened anew reads the files anew', async () => {
    const { feed } = await tab(['loss']);
    feed.answer = asked => (asked.what === 'curves' ? { version: 0, complete: true, series: [] } : null);
    await vi.waitFor(() => expect(feed.asked('curves').length).toBeGreaterThan(1), PATIENT);
    answers(feed, 1);
    const asked = feed.asked('curves').length;
    await vi.waitFor(() => expect(feed.asked('curves')).toHaveLength(asked + 1), PATIENT);
    await new Promise(resolve => setTimeout(resolve, 700));
    expect(feed.asked('curves')).toHaveLength(asked + 1);
  });

  it('is asked nothing while it is not seen', async () => {
    const { feed, tab: shown } = await tab(['loss']);
    shown.hide();
    feed.say(status({ curves: { version: 9, names: ['loss'], note: '' } }));
    await new Promise(resolve => setTimeout(resolve, 600));
    expect(feed.asked('curves')).toHaveLength(0);
  });

  it('bounds what is on the page, and shows more on request', async () => {
    await tab(Array.from({ length: 100_000 }, (_, index) => `c${index}`));
    expect(page.root.querySelectorAll('.td-curve')).toHaveLength(PAGE);
    find(page.root, '.td-more button').click();
    expect(page.root.querySelectorAll('.td-curve')).toHaveLength(2 * PAGE);
  });

  it('filters by name, and keeps names as text', async () => {
    await tab(['loss', '<img src=x onerror=alert(1)>']);
    expect(page.root.querySelector('img')).toBeNull();
    const field = find(page.root, 'input[type=search]') as HTMLInputElement;
    field.value = 'lo';
    field.dispatchEvent(new Event('input'));
    expect([...page.root.querySelectorAll('.td-curve-name')].map(each => each.textContent)).toEqual(['loss']);
  });

  it('asks anew for another mode or x', async () => {
    const { feed } = await tab(['loss']);
    await vi.waitFor(() => expect(feed.asked('curves')).toHaveLength(1), PATIENT);
    const mode = find(page.root, 'select') as HTMLSelectElement;
    mode.value = 'ranks';
    mode.dispatchEvent(new Event('change'));
    await vi.waitFor(() => expect(feed.asked('curves')[1]).toMatchObject({ mode: 'ranks' }), PATIENT);
  });

  it('says of the ranks in the legend how they stand', async () => {
    const { feed } = await tab(['loss']);
    const mode = find(page.root, 'select') as HTMLSelectElement;
    mode.value = 'ranks';
    mode.dispatchEvent(new Event('change'));
    await vi.waitFor(() => expect(find(page.root, '.td-legend-item', 'rank 1').title).toBe('rank 1: running'), PATIENT);
    feed.say(event(2, 'rank.exited', { rank: 1, state: 'lost', why: 'its host is gone' }));
    await vi.waitFor(() => expect(find(page.root, '.td-legend-item', 'rank 1').title).toBe('rank 1: its host is gone'));
    expect(find(page.root, '.td-legend-item', 'rank 1').querySelector('[data-tone=failed] svg')).not.toBeNull();
  });

  it('counts in the legend the ranks that share a colour', () => {
    const ranks = Array.from({ length: 5 }, (_, rank) => aRank(rank, rank === 4 ? { state: 'lost' } : {}));
    const lines = legendOf(aState(ranks), 'ranks', ['red', 'green']);
    expect(lines.map(({ text, standing }) => [text, standing.words])).toEqual([
      ['rank 0, 2…', '1 lost, 2 running'],
      ['rank 1, 3…', '2 running']
    ]);
    expect(legendOf(aState(ranks), 'rank0', ['red']).map(({ text }) => text)).toEqual(['rank 0']);
    expect(legendOf(aState(ranks), 'band', ['red'])).toEqual([]);
  });

  it('asks for the range that a key zooms to, and for all of it once x is another', async () => {
    drawsNothing();
    const { feed } = await tab(['loss']);
    await vi.waitFor(() => expect(feed.asked('curves')).toHaveLength(1), PATIENT);
    // Without a width nothing is drawn, and a plot that shows nothing has no range to zoom in.
    const plot = find(page.root, '.td-plot');
    Object.defineProperty(plot, 'clientWidth', { value: 300 });
    grows(feed, 2, ['loss']);
    await vi.waitFor(() => expect(plot.getAttribute('aria-label')).toContain('at step 2'), PATIENT);
    plot.dispatchEvent(new KeyboardEvent('keydown', { key: '+', bubbles: true, cancelable: true }));
    await vi.waitFor(() => expect(feed.asked('curves').at(-1)).toMatchObject({ low: 0.5, high: 1.5 }), PATIENT);
    await vi.waitFor(() => expect(find(page.root, 'button', 'all of it').hidden).toBe(false), PATIENT);
    const x = page.root.querySelectorAll('select')[1]!;
    x.value = 'time';
    x.dispatchEvent(new Event('change'));
    const all = { x: 'time', low: null, high: null };
    await vi.waitFor(() => expect(feed.asked('curves').at(-1)).toMatchObject(all), PATIENT);
  });

  it('says why there are no points, and asks again once the connection is back', async () => {
    const { feed, session } = await played(page.signal, hello(aState([aRank(0)])));
    feed.answer = () => ({ error: 'the file <b>cannot</b> be read' });
    feed.say(status({ curves: { version: 1, names: ['loss'], note: '' } }));
    await frames();
    new CurvesTab(page.root, session, page.signal).show();
    await vi.waitFor(
      () => expect(find(page.root, '.td-curve-note').textContent).toBe('the file <b>cannot</b> be read'),
      PATIENT
    );
    await new Promise(resolve => setTimeout(resolve, 700));
    expect(feed.asked('curves')).toHaveLength(1);
    feed.handlers.lost('the line is cut', false);
    await frames();
    feed.handlers.connected();
    feed.say(hello(aState([aRank(0)])));
    await vi.waitFor(() => expect(feed.asked('curves')).toHaveLength(2), PATIENT);
  });
});
