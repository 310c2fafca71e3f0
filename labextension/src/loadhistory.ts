/** What the network of each host carried and what each GPU did, as far as this page has seen it. */
import type { Plan } from './protocol';
import type { Status } from './source';

/** Points that are kept, and seconds between two: five minutes. */
const KEPT = 150;
const PERIOD = 2;

export type Chart = 'network' | 'gpu' | 'nvlink';

/** One line of a chart. `values` go with `LoadHistory.times`; NaN: not known. */
export interface LoadLine {
  chart: Chart;
  /** Of the plan. */
  node: string;
  /** An interface, and whether it is what it sent; or a rank. */
  name: string;
  sent: boolean;
  /** Bytes per second; of a GPU per cent. */
  values: number[];
}

export class LoadHistory {
  /** Seconds since the epoch, on the page's clock. */
  readonly times: number[] = [];
  private readonly kept = new Map<string, LoadLine>();

  get lines(): LoadLine[] {
    return [...this.kept.values()];
  }

  /** Takes what a status tells: a new point, or within `PERIOD` of the last one that point anew. */
  take(status: Status, plan: Plan | null, t: number): void {
    if (!plan) {
      return;
    }
    if (t - (this.times.at(-1) ?? -Infinity) >= PERIOD) {
      this.times.push(t);
      this.lines.forEach(line => line.values.push(NaN));
    }
    for (const [node, interfaces] of Object.entries(status.network ?? {})) {
      for (const [name, { received, sent }] of Object.entries(interfaces)) {
        this.put('network', node, name, false, received);
        this.put('network', node, name, true, sent);
      }
    }
    for (const { name, ranks } of plan.nodes) {
      for (const rank of ranks) {
        const { gpu = null, nvlink_received: received = null, nvlink_sent: sent = null } = status.gauges?.[rank] ?? {};
        for (const [chart, out, value] of [
          ['gpu', false, gpu],
          ['nvlink', false, received],
          ['nvlink', true, sent]
        ] as const) {
          if (value !== null) {
            this.put(chart, name, String(rank), out, value);
          }
        }
      }
    }
    if (this.times.length > KEPT) {
      this.times.shift();
      this.lines.forEach(line => line.values.shift());
    }
  }

  private put(chart: Chart, node: string, name: string, sent: boolean, value: number): void {
    const key = JSON.stringify([chart, node, name, sent]);
    let line = this.kept.get(key);
    if (!line) {
      line = { chart, node, name, sent, values: this.times.map(() => NaN) };
      this.kept.set(key, line);
    }
    line.values[line.values.length - 1] = value;
  }
}
