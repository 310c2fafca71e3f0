/**
 * The widget (anywidget): a view whose feed is in the kernel, for VS Code, Colab, and where the server does not see the
 * job's files.
 */
import { KernelSource, type Model } from './kernel';
import { JobSession } from './session';
import { make } from './view/dom';
import { type CellNow, JobView } from './view/job';
import { STANDS } from './view/loglist';

/** `text`: the still picture in words. */
interface Snapshot {
  job: string;
  text: string;
}

/** A front end that draws the output anew takes a view away shortly before it asks for the next. */
const SPARE_MS = 2000;

function snapshotOf(model: Model): Snapshot {
  const { job, text } = (model.get('snapshot') ?? {}) as Partial<Snapshot>;
  return { job: typeof job === 'string' ? job : '', text: typeof text === 'string' ? text : '' };
}

/**
 * One view with its session. It outlives the place where it stands: JupyterLab draws a widget anew with each update of
 * its output, and what a reader has opened, typed or scrolled to is not to go with that.
 */
class Lasting {
  private readonly life = new AbortController();
  private readonly element = make('div.td-output-view');
  private readonly scrolled = new Map<Element, [number, number]>();
  private focused: HTMLElement | null = null;
  private place: HTMLElement | null = null;
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor(
    model: Model,
    private readonly ended: () => void
  ) {
    const { signal } = this.life;
    const still = make('pre.td-still');
    const draw = (): void => {
      still.textContent = snapshotOf(model).text;
    };
    model.on('change:snapshot', draw);
    signal.addEventListener('abort', () => model.off('change:snapshot', draw), { once: true });
    draw();
    this.remember(signal);
    const session = new JobSession(snapshotOf(model).job, new KernelSource(model), signal);
    // Other front ends do not say what a cell does. One that waits raises what ended its job.
    const cell = (): CellNow => (session.hello?.spec?.options.background ? 'idle' : 'waits');
    new JobView(this.element, session, { signal, still, heading: true, cell });
  }

  /** Whether nobody sees it: its place is gone, or was left. */
  get spare(): boolean {
    return !this.element.isConnected;
  }

  /** Gives what takes it away from there; it ends soon after, unless it stands elsewhere by then. */
  standIn(place: HTMLElement): () => void {
    clearTimeout(this.timer);
    this.place = place;
    place.classList.add('td-output');
    place.append(this.element);
    this.restore();
    return () => {
      if (this.place === place) {
        this.place = null;
        this.element.remove();
        this.timer = setTimeout(() => this.end(), SPARE_MS);
      }
    };
  }

  private end(): void {
    this.life.abort();
    this.ended();
  }

  /** A document forgets both with an element that is taken out of it. */
  private remember(signal: AbortSignal): void {
    const scroll = ({ target }: Event): void => {
      if (target instanceof Element && target.isConnected) {
        this.scrolled.set(target, [target.scrollTop, target.scrollLeft]);
      }
    };
    this.element.addEventListener('scroll', scroll, { signal, capture: true, passive: true });
    this.element.addEventListener('focusin', event => (this.focused = event.target as HTMLElement), { signal });
    const leave = (): void => {
      // Whether the reader has gone elsewhere or the element is being taken away shows only afterwards.
      setTimeout(() => {
        if (this.element.isConnected && !this.element.contains(document.activeElement)) {
          this.focused = null;
        }
      });
    };
    this.element.addEventListener('focusout', leave, { signal });
  }

  private restore(): void {
    for (const [element, [top, left]] of this.scrolled) {
      if (element.isConnected) {
        element.scrollTo(left, top);
      } else {
        this.scrolled.delete(element);
      }
    }
    // What was remembered may be older than where a list that grows has come to: it knows better.
    for (const scroller of this.element.querySelectorAll('.td-logs-scroll')) {
      scroller.dispatchEvent(new Event(STANDS));
    }
    if (this.focused?.isConnected && (document.activeElement ?? document.body) === document.body) {
      this.focused.focus({ preventScroll: true });
    }
  }
}

interface Widget {
  initialize(where: { model: Model }): void;
  render(where: { model: Model; el: HTMLElement }): () => void;
}

/** Called once for each model: its views are known from one drawing to the next. */
export default function widget(): Widget {
  const views = new Set<Lasting>();
  let lasting: Model | undefined;
  return {
    /** What listens to this model goes on when a view is taken away; what listens to a drawing's own ends with it. */
    initialize({ model }) {
      lasting = model;
    },
    render({ model, el }) {
      let view = [...views].find(({ spare }) => spare);
      if (!view) {
        const made: Lasting = new Lasting(lasting ?? model, () => views.delete(made));
        views.add(made);
        view = made;
      }
      return view.standIn(el);
    }
  };
}
