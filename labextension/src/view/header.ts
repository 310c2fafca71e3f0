/** The top of a view: what job, how it stands, where, since when, how far, and the way to end it. */
import type { JobState, Plan } from '../protocol';
import type { JobSession } from '../session';
import type { Progress } from '../source';
import { failures, isFinal } from '../state';
import { CancelControl } from './cancel';
import { brokenLine, effectiveState, notesOf, stageOf, titleOf, waitingLines } from './describe';
import { make, setAttribute, setText } from './dom';
import { duration, elapsed, firstLine, grouped, hosts, startedAt, stateWord, ticking, where } from './format';
import { stateIcon, tone } from './icons';
import { Pace } from './pace';
import { brokenCurves } from './series';
import { TrackingLines } from './tracking';
import { trans } from './translate';

const NOTES = 3;

/** Collectives of which it is said that ranks wait in them. */
const WAITS = 3;

/** Curves of which it is said that they are not numbers any more. */
const BROKEN = 3;

export class Header {
  private readonly state = make('span.td-state', { role: 'status' });
  private readonly name = make('span.td-name');
  private readonly where = make('span.td-where');
  private readonly how = make('span.td-how');
  private readonly time = make('span.td-time', { role: 'timer', 'aria-label': trans('elapsed'), 'aria-live': 'off' });
  private readonly pace = make('span.td-pace');
  private readonly reason = make('p.td-reason', { hidden: true });
  private readonly waits = make('p.td-reason.td-waits', { hidden: true });
  private readonly left = make('p.td-reason.td-left', { hidden: true });
  private readonly broken = make('p.td-reason.td-broken', { hidden: true, role: 'alert' });
  private readonly tracked = make('ul.td-tracked', { hidden: true });
  private readonly tracking = new TrackingLines(this.tracked);
  private readonly notes = make('ul.td-notes', { hidden: true });
  private readonly progress: ProgressBar;
  private readonly cancel: CancelControl;
  private readonly steps = new Pace();
  private readonly counted = new Pace();
  private readonly trained = new Pace();
  private shownState = '';
  private shownNotes = '';
  private clock: ReturnType<typeof setInterval> | null = null;

  constructor(
    element: HTMLElement,
    private readonly session: JobSession,
    private readonly options: { heading: boolean; unawaited?: () => boolean },
    private readonly signal: AbortSignal
  ) {
    const actions = make('span.td-actions');
    const line = make('div.td-line', {}, this.state);
    if (options.heading) {
      setAttribute(this.name, 'role', 'heading');
      setAttribute(this.name, 'aria-level', '3');
      line.append(this.name);
    }
    line.append(make('span.td-facts', {}, this.where, this.how, this.time, this.pace), actions);
    const said = [this.reason, this.waits, this.left, this.broken, this.tracked, this.notes];
    const header = make('div.td-header', {}, line, ...said);
    element.append(header);
    this.progress = new ProgressBar(header);
    this.cancel = new CancelControl(actions, session, signal);
    signal.addEventListener('abort', () => this.stop(), { once: true });
    this.update();
  }

  update(): void {
    const { state, status, hello } = this.session;
    const effective = hello ? effectiveState(state, status) : '';
    const queued = effective === 'starting' && state.queued;
    const stage = effective === state.state && stageOf(state);
    const words = queued ? trans('queued, %1', queued) : stage || stateWord(effective);
    if (effective + words !== this.shownState) {
      this.shownState = effective + words;
      setAttribute(this.state, 'data-tone', tone(effective));
      const shape = effective && stateIcon(effective);
      this.state.replaceChildren(...(shape ? [shape, make('span', {}, words)] : []));
    }
    setText(this.name, titleOf(this.session));
    setAttribute(this.name, 'title', [state.name, state.label, this.session.job].filter(Boolean).join(' · '));
    setText(this.where, hello ? where(state) : '');
    setAttribute(this.where, 'title', aboutHosts(state, hello?.plan));
    setText(this.how, strategyOf(hello?.plan));
    this.says(effective);
    const broken = brokenCurves(status?.ranks ?? {}).slice(0, BROKEN);
    setText(this.broken, broken.map(brokenLine).join('\n'));
    this.broken.hidden = broken.length === 0;
    this.tracking.draw(status?.tracked ?? []);
    this.drawNotes(notesOf(state, hello?.notes ?? []));
    this.cancel.update();
    this.tick();
  }

  private says(effective: string): void {
    const { state } = this.session;
    const text = saidOf(state, effective);
    setText(this.reason, firstLine(text, 400));
    this.reason.hidden = text === '';
  }

  private drawNotes(notes: string[]): void {
    const key = notes.join('\n');
    if (key === this.shownNotes) {
      return;
    }
    this.shownNotes = key;
    const rows = notes.slice(0, NOTES).map(note => make('li', { title: note }, firstLine(note, 400)));
    if (notes.length > NOTES) {
      rows.push(make('li', {}, trans('%1 more under Receipt', notes.length - NOTES)));
    }
    this.notes.replaceChildren(...rows);
    this.notes.hidden = notes.length === 0;
  }

  /** The clock runs while the job does and someone can still tell. */
  private tick(): void {
    const { state, connection, clockSkew } = this.session;
    const now = Date.now() / 1000 + clockSkew;
    const passed = elapsed(state, now);
    const waits = waitingLines(state, now).slice(0, WAITS).join('\n');
    setText(this.waits, waits);
    // A wait that comes and goes moves nothing: its place is kept while the job runs.
    this.waits.hidden = waits === '' && (this.waits.hidden || isFinal(state));
    this.drawPace(now);
    this.drawLeft();
    setAttribute(this.time, 'title', state.submitted ? trans('started %1', startedAt(state.submitted, now)) : null);
    setText(this.time, state.submitted ? (isFinal(state) ? duration(passed) : ticking(passed)) : '');
    const running = state.submitted > 0 && !isFinal(state) && connection !== 'gone' && !this.signal.aborted;
    if (!running) {
      this.stop();
    } else if (this.clock === null) {
      this.clock = setInterval(() => this.tick(), 1000);
    }
  }

  /** What to do about results that no cell waits for. Whether one waited shows only while the job runs. */
  private drawLeft(): void {
    const { state, hello, connection } = this.session;
    if (connection !== 'live' || state.submitted === 0) {
      return;
    }
    const over = isFinal(state);
    const brings = hello?.spec?.kind === 'cell' && !hello.spec.options.out.includes('none');
    const unawaited = over ? !this.left.hidden && state.ranks[0]?.results.length : this.options.unawaited?.();
    this.left.hidden = !(brings && unawaited);
    const words = over
      ? trans('No cell waited for the results. They come with ')
      : trans('No cell waits for the results. When the job has ended, they come with ');
    if (!this.left.hidden && this.left.firstChild?.textContent !== words) {
      const command = `import jupyter_torchdist as td; td.attach('${this.session.job}').bring()`;
      this.left.replaceChildren(words, make('code', {}, command));
    }
  }

  /** Of the job's own progress bar, else of the step of the rank that is furthest behind. */
  private drawPace(now: number): void {
    const { state, status } = this.session;
    const over = isFinal(state);
    const progress = status?.progress ?? null;
    const steps = Object.values(status?.ranks ?? {}).flatMap(({ step }) => (step === null ? [] : [Number(step)]));
    if (progress) {
      this.counted.take(Number(progress.n), now);
    }
    if (steps.length > 0) {
      this.steps.take(Math.min(...steps), now);
    }
    if (typeof status?.samples === 'number') {
      this.trained.take(status.samples, now);
    }
    const samples = over ? [] : this.trained.samples(now);
    this.progress.draw(progress, over, over ? [] : [...this.counted.words(now, progress), ...samples]);
    setText(this.pace, over || progress ? '' : [...this.steps.words(now), ...samples].join(' · '));
  }

  private stop(): void {
    if (this.clock !== null) {
      clearInterval(this.clock);
      this.clock = null;
    }
  }
}

/** The sentence under the name. What failed has a place of its own below. */
function saidOf(state: JobState, effective: string): string {
  switch (effective) {
    case 'orphaned':
      return trans('Its driver has died: `%dist attach` gives it another.');
    case 'unreachable':
      return trans('The host of its driver does not answer.');
    case 'succeeded':
      return '';
    case 'stopping':
      return state.reason === 'timed_out' ? trans('Its time is up.') : '';
    default:
      return failures(state).length > 0 && state.state === 'failed' ? '' : state.reason;
  }
}

/** What divides the cell; empty where nothing does. */
function strategyOf(plan: Partial<Plan> | null | undefined): string {
  const strategy = plan?.strategy?.name ?? 'none'; // the plan of an earlier version has none
  return strategy === 'none' ? '' : strategy;
}

/** On which hosts the ranks run, and by what they talk to each other. */
function aboutHosts(state: JobState, plan: Partial<Plan> | null | undefined): string {
  const names = hosts(state).slice(0, 32).join(', ');
  return [names, plan?.backend ? trans('backend: %1', plan.backend) : ''].filter(Boolean).join('\n');
}

/** The job's own bar (`td.progress`). */
class ProgressBar {
  private readonly text = make('span.td-progress-text');
  private readonly fill = make('span.td-progress-fill');
  private readonly bar = make(
    'span.td-progress-bar',
    { role: 'progressbar', 'aria-label': trans('progress') },
    this.fill
  );
  private readonly row = make('div.td-progress', { hidden: true }, this.bar, this.text);

  constructor(element: HTMLElement) {
    element.append(this.row);
  }

  draw(progress: Progress | null, over: boolean, pace: string[]): void {
    this.row.hidden = progress === null;
    if (!progress) {
      return;
    }
    const share = progressShare(progress);
    setAttribute(this.bar, 'aria-valuemin', 0);
    setAttribute(this.bar, 'aria-valuemax', share === null ? null : 100);
    setAttribute(this.bar, 'aria-valuenow', share === null ? null : Math.floor(share * 100));
    setAttribute(this.bar, 'data-unknown', share === null && !over);
    this.fill.style.transform = share === null ? '' : `scaleX(${share.toFixed(4)})`;
    const text = [progressText(progress), ...pace].join(' · ');
    setAttribute(this.bar, 'aria-valuetext', text);
    setText(this.text, text);
  }
}

/** 0 to 1, or null where nobody knows how much there is. */
export function progressShare({ n, total }: Progress): number | null {
  const share = Number(n) / Number(total);
  return total === null || Number(total) <= 0 || !Number.isFinite(share) ? null : Math.min(Math.max(share, 0), 1);
}

/** `epoch 3: 320 of 1000 (32 %)`. */
export function progressText(progress: Progress): string {
  const share = progressShare(progress);
  const n = grouped(Number(progress.n));
  const counted =
    share === null ? n : trans('%1 of %2 (%3 %)', n, grouped(Number(progress.total)), Math.floor(share * 100));
  return progress.desc ? `${firstLine(progress.desc, 80)}: ${counted}` : counted;
}
