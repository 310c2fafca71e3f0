/** One job in the panel. Made once; told what changed. */
import { copyIcon, deleteIcon, type LabIcon, notebookIcon, refreshIcon, stopIcon } from '@jupyterlab/ui-components';

import type { JobSummary } from './api';
import type { Action } from './commands';
import { isFinal, jobTitle, named, notebookName } from './joblist';
import { brokenLine, stallLine, waitingLine } from './view/describe';
import { shownLines } from './view/ansi';
import { button, make, setAttribute, setText } from './view/dom';
import { duration, firstLine, ranks, sizeOf, startedAt, stateWord, ticking } from './view/format';
import { stateIcon, tone } from './view/icons';
import { Pace } from './view/pace';
import { trans } from './view/translate';

const SVG = 'http://www.w3.org/2000/svg';
const SPARK = { width: 60, height: 16 };

export class JobRow {
  readonly element: HTMLLIElement;

  constructor(
    readonly job: string,
    private readonly act: (action: Action) => void
  ) {
    const { signal } = this.life;
    this.open = button('button.td-row-open', '', () => act('open'), signal, { tabindex: -1 });
    this.bar.append(this.fill);
    this.open.append(
      this.icon,
      this.title,
      this.spark,
      make('span.td-row-more', {}, this.facts, ' ', this.when),
      this.gpu,
      make('span.td-row-said', {}, this.reason, this.waits, this.broken),
      this.bar
    );
    this.element = make('li.td-row', { 'data-job': job }, this.open, this.actions);
  }

  update(job: JobSummary, now: number): void {
    if (job !== this.drawn) {
      this.drawn = job;
      this.drawState(job);
      this.drawProgress(job);
      this.drawSpark(job.spark);
      this.drawActions(job);
    }
    this.tick(job, now);
  }

  /** What changes with time alone. */
  tick(job: JobSummary, now: number): void {
    const pace = this.paceOf(job, now);
    const when = job.submitted ? startedAt(job.submitted, now) : '';
    setAttribute(this.when, 'data-when', when);
    const passed = Math.max((job.ended || now) - job.submitted, 0);
    const parts = [
      job.damaged ? trans('damaged') : stateWord(shownState(job)),
      ranks(job.world_size),
      isFinal(job) ? duration(passed) : ticking(passed),
      ...pace,
      notebookName(job)
    ].filter(Boolean);
    setText(this.facts, parts.join(' · '));
    const gpu = job.gpu_memory && !isFinal(job) ? trans('GPU %1', sizeOf(...job.gpu_memory)) : '';
    setText(this.gpu, gpu);
    const reason = isFinal(job) && job.effective !== 'succeeded' ? firstLine(job.reason) : '';
    const waits = job.stall ? stallLine(job.stall, now) : job.wait ? waitingLine(job.wait, now) : '';
    const broken = job.broken.length ? brokenLine(named(job.broken)) : '';
    setText(this.reason, reason);
    setText(this.waits, waits);
    setText(this.broken, broken);
    const { progress } = job;
    const percent = `${Math.round(100 * shareOf(progress))} %`;
    const done = progress?.total && !isFinal(job) ? `, ${[progress.desc, percent].filter(Boolean).join(' ')}` : '';
    // What can be read stands in it as it can be read.
    const began = when ? trans(', started %1', when) : '';
    setAttribute(
      this.open,
      'aria-label',
      trans(
        'Open %1: %2',
        jobTitle(job),
        [...parts, gpu, reason, waits, broken].filter(Boolean).join(', ') + done + began
      )
    );
  }

  private paceOf(job: JobSummary, now: number): string[] {
    if (isFinal(job)) {
      return [];
    }
    const { progress, samples } = job;
    if (progress) {
      this.pace.take(progress.n, now);
    }
    if (samples !== null) {
      this.trained.take(samples, now);
    }
    return [...(progress ? this.pace.words(now, progress) : []), ...this.trained.samples(now)];
  }

  dispose(): void {
    this.life.abort();
    this.element.remove();
  }

  private drawState(job: JobSummary): void {
    setText(this.title, jobTitle(job));
    setAttribute(this.element, 'data-tone', tone(shownState(job)));
    setAttribute(
      this.open,
      'title',
      [jobTitle(job), shownLines(job.reason), job.notebook, job.gpus.join(', '), job.job].filter(Boolean).join('\n')
    );
    setAttribute(this.element, 'data-waits', job.wait !== null || job.stall !== null);
    this.icon.replaceChildren(stateIcon(job.wait && !job.stall ? 'waiting' : shownState(job)));
  }

  private drawProgress(job: JobSummary): void {
    const { progress } = job;
    this.bar.hidden = !progress || isFinal(job);
    this.fill.style.width = `${100 * shareOf(progress)}%`;
    setAttribute(this.bar, 'data-endless', progress !== null && !progress.total);
  }

  private drawSpark(values: readonly number[]): void {
    const finite = values.map((y, x) => ({ x, y })).filter(({ y }) => Number.isFinite(y));
    this.spark.toggleAttribute('hidden', finite.length < 2);
    if (finite.length < 2) {
      return;
    }
    const low = Math.min(...finite.map(({ y }) => y));
    // By halves: the difference of the greatest numbers would be infinite.
    const half = Math.max(...finite.map(({ y }) => y)) / 2 - low / 2 || 1;
    const { width, height } = SPARK;
    const points = finite.map(({ x, y }) => {
      const across = (x / (values.length - 1)) * width;
      return `${across.toFixed(1)},${(height - 1 - ((y / 2 - low / 2) / half) * (height - 2)).toFixed(1)}`;
    });
    this.line.setAttribute('points', points.join(' '));
  }

  /** Only what is possible now. */
  private drawActions(job: JobSummary): void {
    const ended = isFinal(job);
    const wanted: [Action, LabIcon, string, boolean][] = [
      ['cancel', stopIcon, trans('Cancel %1…', jobTitle(job)), !ended],
      ['rerun', refreshIcon, trans('Run %1 again', jobTitle(job)), ended && !job.damaged],
      ['reveal', notebookIcon, trans('Show the cell of %1', jobTitle(job)), job.notebook.endsWith('.ipynb')],
      ['copy', copyIcon, trans('Copy the command of %1', jobTitle(job)), true],
      ['delete', deleteIcon, trans('Delete %1…', jobTitle(job)), ended || job.damaged]
    ];
    const possible = wanted.filter(([, , , now]) => now);
    const drawn = possible.map(([action, , label]) => action + label).join();
    if (drawn === this.drawnActions) {
      return;
    }
    this.drawnActions = drawn;
    const focused = [...this.actions.children].indexOf(document.activeElement as Element);
    this.actions.replaceChildren(...possible.map(([action, icon, label]) => this.action(action, icon, label)));
    if (focused >= 0) {
      this.open.focus();
    }
  }

  private action(action: Action, icon: LabIcon, label: string): HTMLButtonElement {
    const element = button('button.td-row-action', '', () => this.act(action), this.life.signal, {
      title: label,
      'aria-label': label
    });
    icon.element({ container: element, height: '16px', width: '16px' });
    return element;
  }

  private readonly life = new AbortController();
  private readonly open: HTMLButtonElement;
  private readonly icon = make('span.td-row-icon');
  private readonly title = make('span.td-row-title');
  private readonly when = make('span.td-row-when');
  private readonly facts = make('span.td-row-facts');
  private readonly gpu = make('span.td-row-facts.td-row-gpu');
  private readonly reason = make('span.td-row-reason');
  private readonly waits = make('span.td-row-waits');
  private readonly broken = make('span.td-row-broken');
  private readonly bar = make('span.td-row-bar', { hidden: true });
  private readonly fill = make('span.td-row-fill');
  private readonly actions = make('span.td-row-actions');
  private readonly line = document.createElementNS(SVG, 'polyline');
  private readonly spark = sparkLine(this.line);
  private readonly pace = new Pace();
  private readonly trained = new Pace();
  private drawn: JobSummary | null = null;
  private drawnActions = '';
}

function shownState(job: JobSummary): string {
  return job.stall && job.effective === job.state ? 'stalled' : job.effective;
}

/** How much is done, from 0 to 1; a bar that overshoots its total is full. */
function shareOf(progress: JobSummary['progress']): number {
  return progress?.total ? Math.min(progress.n / progress.total, 1) : 0;
}

function sparkLine(line: SVGPolylineElement): SVGSVGElement {
  const spark = document.createElementNS(SVG, 'svg');
  const { width, height } = SPARK;
  for (const [name, value] of Object.entries({ class: 'td-row-spark', viewBox: `0 0 ${width} ${height}` })) {
    spark.setAttribute(name, value);
  }
  spark.setAttribute('aria-hidden', 'true');
  spark.setAttribute('hidden', '');
  spark.append(line);
  return spark;
}
