/**
 * The widget (anywidget): a view whose feed is in the kernel, for VS Code, Colab, and where the server does not see the
 * job's files.
 */
import { KernelSource, type Model } from './kernel';
import { JobSession } from './session';
import { make } from './view/dom';
import { JobView } from './view/job';

/** `text`: the still picture in words. */
interface Snapshot {
  job: string;
  text: string;
}

function snapshotOf(model: Model): Snapshot {
  const { job, text } = (model.get('snapshot') ?? {}) as Partial<Snapshot>;
  return { job: typeof job === 'string' ? job : '', text: typeof text === 'string' ? text : '' };
}

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const life = new AbortController();
  const { signal } = life;
  const still = make('pre.td-still');
  const draw = (): void => {
    still.textContent = snapshotOf(model).text;
  };
  model.on('change:snapshot', draw);
  signal.addEventListener('abort', () => model.off('change:snapshot', draw), { once: true });
  draw();
  const element = make('div.td-output-view');
  el.classList.add('td-output');
  el.append(element);
  const session = new JobSession(snapshotOf(model).job, new KernelSource(model), signal);
  new JobView(element, session, { signal, still, heading: true });
  return () => {
    life.abort();
    element.remove();
  };
}

export default { render };
