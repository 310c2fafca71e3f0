/** The side bar's panel: all jobs of all notebooks, the newest first, filtered by words. */
import type { CommandRegistry } from '@lumino/commands';
import { Widget } from '@lumino/widgets';

import type { JobSummary } from './api';
import { type Action, CommandIds } from './commands';
import { isFinal, type JobList } from './joblist';
import { JobRow } from './row';
import { button, make, setText } from './view/dom';
import { plural, trans } from './view/translate';

/** Rows that are drawn; more with a button. A thousand jobs are there at once. */
const PAGE = 200;

/** Without it a notebook's kernel does not know the magic. */
const LOAD = '%load_ext jupyter_torchdist';

export class JobPanel extends Widget {
  constructor(
    private readonly list: JobList,
    private readonly commands: CommandRegistry
  ) {
    super();
    this.addClass('td-panel');
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', trans('Distributed jobs'));
    const { signal } = this.life;
    this.more = button('button.td-panel-more', '', () => this.showMore(), signal);
    this.filter.addEventListener('input', () => this.draw(), { signal });
    this.rows.addEventListener('keydown', event => this.key(event), { signal });
    this.rows.addEventListener('focusin', event => this.roving(event.target as HTMLElement), { signal });
    this.node.append(this.head(), this.trouble, this.count, this.rows, this.empty, this.more);
    list.onChange(() => this.draw(), signal);
    // Running jobs have a clock.
    const timer = window.setInterval(() => this.isVisible && this.tick(), 1000);
    signal.addEventListener('abort', () => window.clearInterval(timer), { once: true });
    this.draw();
  }

  override dispose(): void {
    this.life.abort();
    super.dispose();
  }

  protected override onActivateRequest(): void {
    this.filter.focus();
  }

  protected override onAfterShow(): void {
    this.draw();
  }

  private head(): HTMLElement {
    const head = make('div.td-panel-head');
    head.append(make('h2.td-panel-title', {}, trans('Distributed jobs')), this.filter);
    return head;
  }

  private matching(): JobSummary[] {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    return [...this.list.jobs.values()]
      .filter(job => {
        const text = [job.job, job.name, job.label, job.notebook, job.effective, ...job.gpus].join(' ').toLowerCase();
        return words.every(word => text.includes(word));
      })
      .sort((one, other) => other.submitted - one.submitted || (other.job < one.job ? -1 : 1));
  }

  /** At most once a frame, and only while somebody sees it. */
  private draw(): void {
    if (this.frame !== null) {
      return;
    }
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      if (!this.isDisposed && (this.isVisible || !this.drawn.size)) {
        this.drawNow();
      }
    });
  }

  private drawNow(): void {
    const jobs = this.matching();
    const shown = jobs.slice(0, this.limit);
    const now = Date.now() / 1000 + this.list.clockSkew;
    const wanted = new Set(shown.map(job => job.job));
    for (const [id, row] of this.drawn) {
      if (!wanted.has(id)) {
        this.remove(id, row);
      }
    }
    let at: Element | null = this.rows.firstElementChild;
    for (const job of shown) {
      const row = this.drawn.get(job.job) ?? this.add(job);
      row.update(job, now);
      if (row.element === at) {
        at = at.nextElementSibling;
      } else {
        this.rows.insertBefore(row.element, at);
      }
    }
    this.say(jobs.length, shown.length);
    this.keepReachable();
  }

  private say(matching: number, shown: number): void {
    const { list } = this;
    setText(this.trouble, list.trouble);
    this.trouble.hidden = !list.trouble;
    setText(this.count, list.loaded ? this.counted(matching) : '');
    const reason = !list.loaded
      ? trans('Loading…')
      : list.jobs.size
        ? trans('No job matches these words')
        : trans('No jobs yet. Run %1 in a notebook, then a cell that begins with %2.', LOAD, '%%distribute');
    setText(this.empty, reason);
    this.empty.hidden = matching > 0 || (!list.loaded && list.trouble !== '');
    this.more.hidden = shown === matching;
    setText(this.more, plural('Show %1 more', 'Show %1 more', matching - shown));
  }

  private counted(matching: number): string {
    const { running } = this.list;
    const jobs = plural('%1 job', '%1 jobs', matching);
    return running ? trans('%1, %2 running', jobs, running) : jobs;
  }

  private add(job: JobSummary): JobRow {
    const row = new JobRow(job.job, action => this.act(job.job, action));
    this.drawn.set(job.job, row);
    return row;
  }

  /** A row that goes takes the focus with it, unless another is given it. */
  private remove(id: string, row: JobRow): void {
    this.drawn.delete(id);
    if (row.element.contains(document.activeElement)) {
      const other = row.element.nextElementSibling ?? row.element.previousElementSibling;
      (other?.querySelector<HTMLElement>('.td-row-open') ?? this.filter).focus();
    }
    row.dispose();
  }

  private act(job: string, action: Action): void {
    void this.commands.execute(CommandIds[action], { job });
  }

  private showMore(): void {
    this.limit += PAGE;
    this.draw();
  }

  private tick(): void {
    const now = Date.now() / 1000 + this.list.clockSkew;
    for (const [id, row] of this.drawn) {
      const job = this.list.jobs.get(id);
      if (job && !isFinal(job)) {
        row.tick(job, now);
      }
    }
  }

  /** Arrow keys walk the rows; Delete asks; a row's other actions are the next stops of the Tab key. */
  private key(event: KeyboardEvent): void {
    const target = event.target as HTMLElement;
    const opens = [...this.rows.querySelectorAll<HTMLElement>('.td-row-open')];
    const at = opens.findIndex(open => open.parentElement!.contains(target));
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: opens.length - 1 }[event.key];
    if (to !== undefined) {
      opens[Math.min(Math.max(to, 0), opens.length - 1)]?.focus();
      event.preventDefault();
    } else if (event.key === 'Delete' && target === opens[at]) {
      this.act(target.parentElement!.dataset['job']!, 'delete');
      event.preventDefault();
    }
  }

  /** One row at a time is a stop of the Tab key. */
  private roving(target: HTMLElement): void {
    const open = target.closest('.td-row')?.querySelector<HTMLElement>('.td-row-open');
    for (const other of this.rows.querySelectorAll<HTMLElement>('.td-row-open[tabindex="0"]')) {
      other.tabIndex = -1;
    }
    if (open) {
      open.tabIndex = 0;
    }
  }

  private keepReachable(): void {
    if (!this.rows.querySelector('.td-row-open[tabindex="0"]')) {
      this.rows.querySelector<HTMLElement>('.td-row-open')?.setAttribute('tabindex', '0');
    }
  }

  private readonly life = new AbortController();
  private readonly drawn = new Map<string, JobRow>();
  private readonly filter = make('input.td-panel-filter', {
    type: 'search',
    placeholder: trans('Filter: name, notebook, state'),
    'aria-label': trans('Filter jobs'),
    spellcheck: 'false'
  });
  private readonly trouble = make('p.td-panel-trouble', { role: 'alert', hidden: true });
  private readonly count = make('p.td-panel-count', { role: 'status' });
  private readonly rows = make('ul.td-rows', { 'aria-label': trans('Jobs, the newest first') });
  private readonly empty = make('p.td-panel-empty');
  private readonly more: HTMLButtonElement;
  private limit = PAGE;
  private frame: number | null = null;
}
