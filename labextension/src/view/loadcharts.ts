/** Charts of each host: what goes over its network, and how busy its GPUs are. */
import type { Chart, LoadHistory, LoadLine } from '../loadhistory';
import type { Plan } from '../protocol';
import { make, setAttribute } from './dom';
import { duration, hostOf, size } from './format';
import { plural, trans } from './translate';

/** Hosts and lines of a chart that are drawn. */
const HOSTS = 16;
const LINES = 16;

const COLOURS = 8;

const SVG = 'http://www.w3.org/2000/svg';
const WIDTH = 1000;
const HEIGHT = 100;

export class LoadCharts {
  readonly element = make('div.td-part', { role: 'group', 'aria-label': trans('Load of network and GPUs') });
  private drawn = 0;

  draw(history: LoadHistory, plan: Plan): void {
    const { times } = history;
    const newest = times.at(-1) ?? 0;
    if (newest === this.drawn || times.length < 2) {
      return;
    }
    this.drawn = newest;
    const span = newest - times[0]!;
    const lines = history.lines.filter(line => line.values.some(Number.isFinite));
    const nodes = plan.nodes.filter(node => lines.some(line => line.node === node.name));
    const charts = nodes.slice(0, HOSTS).flatMap(node => {
      const own = lines.filter(line => line.node === node.name);
      return (['network', 'gpu', 'nvlink'] as const)
        .map(chart => ({ chart, lines: own.filter(line => line.chart === chart) }))
        .filter(({ lines }) => lines.length > 0)
        .map(({ chart, lines }) => figure(chart, hostOf(node), lines));
    });
    const more = nodes.length - HOSTS;
    const title = trans('Network and GPUs, the last %1 that this page was open', duration(span));
    this.element.replaceChildren(
      ...(charts.length > 0 ? [make('strong', {}, title), make('div.td-loads', {}, ...charts)] : []),
      ...(more > 0 ? [make('p.td-more', {}, plural('and %1 more host', 'and %1 more hosts', more))] : [])
    );
  }
}

function figure(chart: Chart, host: string, lines: LoadLine[]): HTMLElement {
  const shown = lines.slice(0, LINES);
  const top = chart === 'gpu' ? 100 : Math.max(1, ...shown.flatMap(line => line.values.filter(Number.isFinite)));
  const svg = document.createElementNS(SVG, 'svg');
  setAttribute(svg, 'viewBox', `0 0 ${WIDTH} ${HEIGHT}`);
  setAttribute(svg, 'preserveAspectRatio', 'none');
  setAttribute(svg, 'aria-hidden', 'true');
  shown.forEach((line, index) => {
    const path = document.createElementNS(SVG, 'path');
    setAttribute(path, 'd', drawing(line.values, top));
    setAttribute(path, 'style', `stroke: var(--td-curve-${index % COLOURS})`);
    svg.append(path);
  });
  const words = {
    network: trans('network, %1', host),
    gpu: trans('GPU use, %1', host),
    nvlink: trans('NVLink, %1', host)
  };
  const items = shown.map((line, index) => {
    const swatch = make('span.td-swatch', { style: `background: var(--td-curve-${index % COLOURS})` });
    return make('span.td-legend-item', {}, swatch, `${nameOf(line)} ${worded(chart, latest(line))}`);
  });
  const more = lines.length - LINES;
  return make(
    'figure.td-load',
    {},
    make(
      'figcaption',
      {},
      make('span', {}, words[chart]),
      make('span.td-soft', {}, trans('up to %1', worded(chart, top)))
    ),
    svg,
    make('div.td-legend', {}, ...items, more > 0 && plural('and %1 more', 'and %1 more', more))
  );
}

/** A line with gaps where nothing is known; the newest value is at the right edge. */
export function drawing(values: readonly number[], top: number): string {
  const step = WIDTH / Math.max(values.length - 1, 1);
  let pen = 'M';
  return values
    .map((value, at) => {
      if (!Number.isFinite(value)) {
        pen = 'M';
        return '';
      }
      const place = `${pen}${Math.round(at * step)} ${Math.round(HEIGHT - (Math.min(value, top) / top) * HEIGHT)}`;
      pen = 'L';
      return place;
    })
    .join('');
}

function nameOf({ chart, name, sent }: LoadLine): string {
  if (chart === 'gpu') {
    return trans('rank %1', name);
  }
  if (chart === 'nvlink') {
    return sent ? trans('rank %1 sent', name) : trans('rank %1 received', name);
  }
  return sent ? trans('%1 sent', name) : trans('%1 received', name);
}

function latest({ values }: LoadLine): number | null {
  const last = values.at(-1);
  return last !== undefined && Number.isFinite(last) ? last : null;
}

function worded(chart: Chart, value: number | null): string {
  if (value === null) {
    return '';
  }
  return chart === 'gpu' ? `${value} %` : trans('%1/s', size(value));
}
