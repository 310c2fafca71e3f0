/** How the ranks reach each other, and when they entered collectives; above that, ranks that hold up the others. */
import type { Communication, Finding, Plan } from '../protocol';
import type { JobSession } from '../session';
import { isFinal } from '../state';
import { make } from './dom';
import { because } from './finding';
import { hostOf } from './format';
import { HostMap } from './hostmap';
import { LoadCharts } from './loadcharts';
import { facts } from './table';
import { Timeline } from './timeline';
import { trans } from './translate';

/** How often, and how many times, it is looked for a recording that was asked for. */
const LOOK_MS = 400;
const LOOKS = 15;

export class CommunicationTab {
  private readonly late = make('section', { role: 'status', 'aria-label': trans('what slows the job') });
  private readonly plan = make('div');
  private readonly map: HostMap;
  private readonly timeline: Timeline;
  private readonly charts = new LoadCharts();
  private visible = false;
  private shown = '';
  private shownPlan: Plan | null = null;
  private told: Communication | null = null;
  /** Whether the ranks had ended when it was asked last; null: it was not. */
  private asked: boolean | null = null;
  private busy = false;
  private said = '';

  constructor(
    element: HTMLElement,
    private readonly session: JobSession,
    private readonly signal: AbortSignal,
    toLog: (rank: number) => void
  ) {
    this.map = new HostMap(session, signal, toLog);
    this.timeline = new Timeline(() => void this.record(), signal);
    const { late, plan, map, timeline, charts } = this;
    element.append(make('div.td-page', {}, late, plan, map.element, timeline.element, charts.element, ask()));
    session.onChange(changes => (changes.has('state') || changes.has('status')) && this.draw(), signal);
  }

  show(): void {
    this.visible = true;
    this.asked = null;
    this.draw();
  }

  hide(): void {
    this.visible = false;
  }

  private draw(): void {
    if (!this.visible) {
      return;
    }
    const { hello, state, status } = this.session;
    const plan = hello?.plan ?? null;
    this.drawLate(status?.findings ?? []);
    if (plan) {
      if (plan !== this.shownPlan) {
        this.shownPlan = plan;
        this.plan.replaceChildren(planned(plan));
      }
      this.map.draw(plan, this.told?.transports ?? null);
      this.charts.draw(this.session.load, plan);
      this.timeline.draw(this.told, !isFinal(state), this.busy, this.said);
    }
    if (hello && this.asked !== isFinal(state)) {
      this.asked = isFinal(state);
      void this.ask(false);
    }
  }

  private drawLate(findings: readonly Finding[]): void {
    const key = JSON.stringify(findings);
    if (key !== this.shown) {
      this.shown = key;
      this.late.replaceChildren(...findings.map(finding => because(finding, this.session.job, this.signal)));
    }
  }

  private async ask(fresh: boolean): Promise<void> {
    try {
      this.told = await this.session.ask<'communication'>({ what: 'communication', fresh });
      this.said = '';
    } catch (error) {
      this.said = (error as Error).message;
    }
    this.draw();
  }

  /** Asks the ranks, and looks until what they wrote is newer than what was known, and for the slower ones once more. */
  private async record(): Promise<void> {
    const before = this.told?.time ?? null;
    this.busy = true;
    await this.ask(true);
    for (let look = 0; look < LOOKS && !this.said && !this.signal.aborted; look++) {
      const there = (this.told?.time ?? null) !== before;
      await new Promise(resolve => setTimeout(resolve, LOOK_MS));
      await this.ask(false);
      if (there) {
        break;
      }
    }
    this.busy = false;
    this.draw();
  }
}

function planned(plan: Plan): HTMLElement {
  const first = plan.nodes[0];
  return facts([
    [trans('backend'), plan.backend],
    [trans('rendezvous'), first ? trans('on %1 (%2)', hostOf(first), first.address) : '']
  ]);
}

function ask(): HTMLElement {
  return make(
    'div.td-empty',
    {},
    make('p', {}, trans('Where the time of a step goes: '), make('code', {}, '%dist profile JOB')),
    make('p', {}, trans('To check the links now, run this in a cell: '), make('code', {}, '%dist doctor'))
  );
}
