import type { IDocumentManager } from '@jupyterlab/docmanager';
import type { INotebookTracker } from '@jupyterlab/notebook';
import { MimeModel, RenderMimeRegistry, standardRendererFactories } from '@jupyterlab/rendermime';
import { Widget } from '@lumino/widgets';
import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';

import './played';
import { JobRenderer, rendererFactory } from '../src/mime';
import { renderWith } from '../src/richoutput';
import { MIME_TYPE, VERSION } from '../src/protocol';
import { newJobState } from '../src/state';
import { Serving, timeByTurns, until } from './serving';

timeByTurns();

let serving: Serving;
let rendermime: RenderMimeRegistry;
let renderer: JobRenderer;

beforeEach(async () => {
  serving = await Serving.start();
  rendermime = new RenderMimeRegistry({ initialFactories: standardRendererFactories });
  const factory = rendererFactory({ settings: serving.settings, rendermime, notebooks: null, documents: null });
  rendermime.addFactory(factory, -20);
  renderer = rendermime.createRenderer(MIME_TYPE) as JobRenderer;
  renderer.addClass('jp-OutputArea-output');
  Widget.attach(renderer, document.body);
});

afterEach(async () => {
  renderer.dispose();
  await serving.stop();
});

function output(data: Record<string, unknown>, trusted = false): MimeModel {
  return new MimeModel({ data: data as never, trusted });
}

function bundle(job: string, html = '<p>still</p>'): Record<string, unknown> {
  return { [MIME_TYPE]: { job, host: 'box' }, 'text/html': html, 'text/plain': 'still' };
}

test('is chosen before the widget and HTML, trusted or not', () => {
  const all = { ...bundle('a'), 'application/vnd.jupyter.widget-view+json': { model_id: 'm' } } as never;
  expect(rendermime.preferredMimeType(all, 'ensure')).toBe(MIME_TYPE);
  expect(rendermime.preferredMimeType(all, 'any')).toBe(MIME_TYPE);
});

test('one connection a job, however often the output is updated', async () => {
  await renderer.renderModel(output(bundle('a')));
  await renderer.renderModel(output(bundle('a', '<p>later</p>')));
  await until(() => serving.sockets.length === 1, 'a connection');
  await renderer.renderModel(output(bundle('b')));
  await until(() => serving.asked.filter(asked => asked.startsWith('WS')).length === 2, 'another job');
  expect(serving.asked[0]).toContain('/jobs/a/feed');
  expect(serving.asked[1]).toContain('/jobs/b/feed');
  expect(renderer.node.classList).toContain('jp-OutputArea-output');
  expect(renderer.node.querySelectorAll('.td-view')).toHaveLength(1);
});

test('a job that is not here: the still picture, sanitised', async () => {
  serving.refuse = 404;
  await renderer.renderModel(
    output(bundle('a', '<p>still</p><script>window.bad = 1</script><img src=x onerror="bad()">'))
  );
  await until(() => renderer.node.textContent!.includes('still'), 'the picture');
  expect(renderer.node.querySelector('script, [onerror]')).toBeNull();
});

test.each([
  [true, "or was deleted. If this notebook's kernel has it, its view comes here as soon as no cell runs."],
  [false, 'or was deleted. Below is the picture that was saved with the notebook.']
])('a job that the kernel may have: said, where its widget may be shown (%s)', async (trusted, words) => {
  serving.refuse = 404;
  serving.answer = () => ({ status: 404, body: { message: 'no job a', hint: 'look at the list' } });
  const widget = { 'application/vnd.jupyter.widget-view+json': { model_id: 'm' } };
  await renderer.renderModel(output({ ...bundle('a'), ...widget }, trusted));
  await until(() => renderer.node.textContent!.includes(words), words);
});

test('an output that names no job says so', async () => {
  await renderer.renderModel(output({ [MIME_TYPE]: ['what'] }));
  expect(renderer.node.textContent).toContain('names no job');
  expect(serving.asked).toEqual([]);
});

test('everything ends when the output is cleared', async () => {
  await renderer.renderModel(output(bundle('a')));
  await until(() => serving.sockets.length === 1, 'a connection');
  const closed = new Promise(resolve => serving.sockets[0]!.once('close', resolve));
  renderer.dispose();
  await closed;
});

describe('a notebook whose job goes on', () => {
  const save = vi.fn(async () => undefined);

  /** The output in a notebook of which something is not saved. */
  async function shown(state: string, autosave: boolean): Promise<void> {
    const empty = { spec: null, plan: null, receipt: [], notes: [], command: '', sizes: {} };
    const hello = { n: 1, type: 'hello', version: VERSION, now: 1, job: 'a', state: { ...newJobState(), state } };
    serving.greeting = [{ ...hello, ...empty }];
    const context = { model: { dirty: true }, contentsModel: { writable: true }, save };
    const notebooks = { find: () => ({ context }) } as unknown as INotebookTracker;
    const documents = { autosave } as IDocumentManager;
    const factory = rendererFactory({ settings: serving.settings, rendermime, notebooks, documents });
    const own = factory.createRenderer({} as never) as JobRenderer;
    Widget.attach(own, document.body);
    await own.renderModel(output(bundle('a')));
    await until(() => own.node.querySelector('.td-view[data-connection="live"]') !== null, 'live');
    own.dispose();
  }

  beforeEach(() => save.mockClear());

  test.each([
    ['running', true, 1],
    ['running', false, 0],
    ['succeeded', true, 0]
  ])('%s, saved by itself: %s', async (state, autosave, times) => {
    await shown(state, autosave);
    expect(save).toHaveBeenCalledTimes(times);
  });
});

describe('a job that the server does not see, with a widget', () => {
  const WIDGET = 'application/vnd.jupyter.widget-view+json';
  const GIVEN = { ...bundle('a'), [WIDGET]: { model_id: 'm1', version_major: 2, version_minor: 0 } };
  const drawn: unknown[] = [];

  /** What a notebook's widget manager has in the registry of its own; it draws when `DRAWS` is told to. */
  class Drawing extends Widget {
    async renderModel(model: MimeModel): Promise<void> {
      drawn.push(model.data[WIDGET]);
      this.node.append(document.createElement('pre')); // anything but a view: the model is being loaded
    }

    finish(): void {
      const view = new Widget();
      view.addClass('jupyter-widgets');
      this.node.replaceChildren(view.node);
    }
  }

  const managers: Drawing[] = [];
  /** Whether the cell stands in its notebook already. */
  let stands = true;
  const factory = {
    safe: false,
    mimeTypes: [WIDGET],
    createRenderer: () => {
      managers.push(new Drawing());
      return managers.at(-1)!;
    }
  };

  /** The output of a notebook in which the manager is there from the beginning, or comes later. */
  async function shown(trusted: boolean, later = false): Promise<{ own: JobRenderer; notebook: RenderMimeRegistry }> {
    serving.refuse = 404;
    const notebook = rendermime.clone();
    const panel = { content: { rendermime: notebook }, sessionContext: { ready: Promise.resolve() } };
    const notebooks = { find: () => (stands ? panel : undefined) } as unknown as INotebookTracker;
    const surroundings = { settings: serving.settings, rendermime, notebooks, documents: null };
    const own = rendererFactory(surroundings).createRenderer({} as never) as JobRenderer;
    Widget.attach(own, document.body);
    if (!later) {
      notebook.addFactory(factory as never, -10);
    }
    await own.renderModel(output(GIVEN, trusted));
    await until(() => own.node.querySelector('.td-view[data-connection="gone"]') !== null, 'the 404');
    return { own, notebook };
  }

  function ownView(own: JobRenderer): HTMLElement {
    return own.node.querySelector<HTMLElement>('.td-output-view')!;
  }

  beforeEach(() => {
    drawn.length = managers.length = 0;
    stands = true;
  });

  test('the widget takes the place as soon as it has drawn', async () => {
    const { own } = await shown(true);
    await until(() => drawn.length === 1, 'the widget');
    expect(drawn).toEqual([GIVEN[WIDGET]]);
    const place = own.node.querySelector<HTMLElement>('.td-output-widget')!;
    expect([place.hidden, ownView(own).hidden]).toEqual([true, false]);
    expect(own.node.textContent).toContain('still');
    managers[0]!.finish();
    await until(() => !place.hidden, 'the place of the widget');
    expect(ownView(own).hidden).toBe(true);
    await own.renderModel(output({ ...GIVEN, 'text/html': '<p>later</p>' }, true));
    expect([drawn.length, place.isConnected, place.hidden]).toEqual([1, true, false]);
    own.dispose();
    expect(managers[0]!.isDisposed).toBe(true);
  });

  test('the manager comes later: it belongs to the kernel', async () => {
    const { own, notebook } = await shown(true, true);
    expect(drawn).toEqual([]);
    notebook.addFactory(factory as never, -10);
    await until(() => drawn.length === 1, 'the widget');
    own.dispose();
  });

  test('the cell comes into its notebook later: a page that is loaded is busy', async () => {
    stands = false;
    const { own } = await shown(true);
    await new Promise(resolve => setTimeout(resolve, 50));
    expect(drawn).toEqual([]);
    stands = true;
    await until(() => drawn.length === 1, 'the widget');
    own.dispose();
  });

  test('not in a notebook that is not trusted: the still picture stays', async () => {
    const { own } = await shown(false);
    await own.renderModel(output({ ...GIVEN, 'text/html': '<p>later</p>' }, false));
    await until(() => own.node.textContent!.includes('later'), 'the picture');
    expect([managers.length, own.node.querySelector('.td-output-widget')]).toEqual([0, null]);
    expect(ownView(own).hidden).toBe(false);
    own.dispose();
  });
});

describe('what a rank displayed', () => {
  const draw = async (data: Record<string, unknown>): Promise<[HTMLElement, AbortController]> => {
    const [element, life] = [document.createElement('div'), new AbortController()];
    document.body.append(element);
    await renderWith(rendermime)({ data, metadata: {} }, element, life.signal);
    return [element, life];
  };

  test('is drawn as JupyterLab does, but never trusted, and goes with its signal', async () => {
    const html = '<table><tr><td>42</td></tr></table><script>window.ran = 1</script><img src="x" onerror="ran = 1">';
    const [element, life] = await draw({ 'text/html': html, 'text/plain': 'plain' });
    expect(element.querySelector('.jp-RenderedHTMLCommon td')!.textContent).toBe('42');
    expect([element.querySelector('script'), element.querySelector('[onerror]')]).toEqual([null, null]);
    life.abort();
    expect(element.childElementCount).toBe(0);
    element.remove();
  });

  test('a picture is preferred to its text', async () => {
    const [element, life] = await draw({ 'text/plain': 'Figure', 'image/png': 'aGk=' });
    expect(element.querySelector('img')!.src).toBe('data:image/png;base64,aGk=');
    life.abort();
    element.remove();
  });

  test('what has no safe form is refused in words', async () => {
    const javascript = { 'application/javascript': 'window.ran = 1' };
    await expect(draw(javascript)).rejects.toThrow('There is no safe way to show application/javascript here.');
    expect('ran' in window).toBe(false);
  });
});
