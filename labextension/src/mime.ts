/**
 * The output under a cell: a renderer of our own type, chosen before the widget of the same output because it needs
 * no kernel. Where this server does not know the job, the widget or the still picture takes its place.
 */
import type { IDocumentManager } from '@jupyterlab/docmanager';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { type IRenderMimeRegistry, MimeModel } from '@jupyterlab/rendermime';
import type { IRenderMime } from '@jupyterlab/rendermime-interfaces';
import type { ServerConnection } from '@jupyterlab/services';
import { Widget } from '@lumino/widgets';

import { downloadLog } from './api';
import { MIME_TYPE } from './protocol';
import { showLine } from './reveal';
import { renderWith } from './richoutput';
import { ServerSource } from './server';
import { JobSession } from './session';
import { isFinal } from './state';
import { make } from './view/dom';
import { type CellNow, JobView } from './view/job';
import { trans } from './view/translate';

const WIDGET_TYPE = 'application/vnd.jupyter.widget-view+json';

export interface Surroundings {
  settings: ServerConnection.ISettings;
  rendermime: IRenderMimeRegistry;
  /** Null outside of notebooks. */
  notebooks: INotebookTracker | null;
  documents: IDocumentManager | null;
}

export function rendererFactory(surroundings: Surroundings): IRenderMime.IRendererFactory {
  return { safe: true, mimeTypes: [MIME_TYPE], createRenderer: () => new JobRenderer(surroundings) };
}

/** What the output holds: the job, and the forms for front ends that know less. */
interface Shown {
  job: string;
  html: string;
  widget: string;
  trusted: boolean;
}

function read(model: IRenderMime.IMimeModel): Shown | null {
  const data = model.data[MIME_TYPE];
  const job = (data as { job?: unknown } | null | undefined)?.job;
  if (typeof job !== 'string' || !job) {
    return null;
  }
  const html = model.data['text/html'];
  const widget = model.data[WIDGET_TYPE] as { model_id?: string } | undefined;
  return {
    job,
    html: Array.isArray(html) ? html.join('') : typeof html === 'string' ? html : '',
    widget: widget?.model_id ?? '',
    trusted: model.trusted
  };
}

/** Of a cell, as its model has them. */
interface Outputs {
  length: number;
  get(index: number): { type: string };
}

/** Notebooks that are being saved: two savings at once would each take the other for somebody else's. */
const SAVING = new WeakSet<object>();

/** One output. `renderModel` comes again with each update of it; the view of a job is made once. */
export class JobRenderer extends Widget implements IRenderMime.IRenderer {
  constructor(private readonly surroundings: Surroundings) {
    super();
    this.addClass('td-output');
  }

  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    const shown = read(model);
    if (shown === null) {
      this.end();
      this.node.textContent = trans('This output names no job: it was changed by something else');
      return;
    }
    // The widget's form goes when the job is over; the view that stands stays, unless the widget is what stands.
    const same = this.shown?.job === shown.job && (this.shown.widget === shown.widget || this.widget === null);
    const html = this.shown?.html;
    this.shown = shown;
    if (html !== shown.html || !same) {
      await this.drawStill(shown);
    }
    if (!same && !this.isDisposed) {
      this.start(shown);
    }
  }

  override dispose(): void {
    this.end();
    super.dispose();
  }

  private start(shown: Shown): void {
    this.end();
    this.life = new AbortController();
    const { signal } = this.life;
    const element = make('div.td-output-view');
    this.node.replaceChildren(element);
    const comes = trans("If this notebook's kernel has it, its view comes here as soon as no cell runs.");
    const elsewhere = shown.widget && shown.trusted ? comes : '';
    const source = new ServerSource(this.surroundings.settings, shown.job, elsewhere);
    const session = new JobSession(shown.job, source, signal);
    const download = (file: string) => downloadLog(this.surroundings.settings, shown.job, file);
    const reveal = (cell: string, line: number) => this.reveal(session, cell, line);
    const cell = () => this.cell();
    const render = renderWith(this.surroundings.rendermime);
    new JobView(element, session, { signal, still: this.still, heading: true, download, render, reveal, cell });
    let kept = false;
    session.onChange(() => {
      if (!kept && session.hello && !isFinal(session.state)) {
        kept = true;
        this.keep();
      }
      if (session.connection === 'gone' && session.hello === null && shown.widget) {
        void this.showWidget(shown, signal);
      }
    }, signal);
  }

  /** A line of this notebook: of the cell that this output is of, or of another one by its number. */
  private async reveal(session: JobSession, cell: string, line: number): Promise<void> {
    const panel = this.panel();
    if (!panel) {
      throw new Error(trans('This output is not in a notebook.'));
    }
    const own = cell === session.hello?.spec?.label;
    const index = panel.content.widgets.findIndex(each => each.node.contains(this.node));
    await showLine(panel, own ? index : -1, cell, line);
  }

  /** A page that was loaded while a cell runs knows of the kernel alone that it is busy. */
  private cell(): CellNow {
    const panel = this.panel();
    const cell = panel?.content.widgets.find(each => each.node.contains(this.node));
    if (!panel || !cell) {
      return 'waits';
    }
    const { outputs } = cell.model as { outputs?: Outputs };
    if (Array.from({ length: outputs?.length ?? 0 }, (_, at) => outputs!.get(at).type).includes('error')) {
      return 'failed';
    }
    const { isReady, session } = panel.sessionContext;
    const status = session?.kernel?.status ?? (isReady ? 'idle' : 'unknown');
    const runs = cell.node.querySelector('.jp-InputPrompt')?.textContent?.includes('*') ?? false;
    return runs || status !== 'idle' ? 'waits' : 'idle';
  }

  private end(): void {
    this.life?.abort();
    this.life = null;
    this.widget?.dispose();
    this.widget = null;
    if (!this.isDisposed) {
      this.node.replaceChildren();
    }
  }

  /** A reloaded page has what was saved: where notebooks are saved by themselves, one whose job goes on is, at once. */
  private keep(): void {
    const context = this.panel()?.context;
    if (!context || SAVING.has(context) || !context.model.dirty || !context.contentsModel?.writable) {
      return;
    }
    if (this.surroundings.documents?.autosave) {
      SAVING.add(context);
      context
        .save()
        .catch((error: unknown) => console.error('torchdist: the notebook was not saved', error))
        .finally(() => SAVING.delete(context));
    }
  }

  /** As any HTML output is drawn: sanitised, unless the notebook is trusted. */
  private async drawStill(shown: Shown): Promise<void> {
    if (!shown.html) {
      this.still.replaceChildren();
      return;
    }
    const renderer = this.surroundings.rendermime.createRenderer('text/html');
    await renderer.renderModel(new MimeModel({ data: { 'text/html': shown.html }, trusted: shown.trusted }));
    this.still.replaceChildren(...renderer.node.childNodes);
    renderer.dispose();
  }

  /** A kernel elsewhere: its widget, as soon as it has drawn something, in place of the view. */
  private async showWidget(shown: Shown, signal: AbortSignal): Promise<void> {
    if (this.widget || !shown.trusted) {
      return;
    }
    const rendermime = await this.notebookRendermime(signal);
    if (signal.aborted || this.widget || !rendermime?.getFactory(WIDGET_TYPE)) {
      return;
    }
    const widget = rendermime.createRenderer(WIDGET_TYPE);
    this.widget = widget;
    const place = make('div.td-output-widget', { hidden: true });
    this.node.append(place);
    Widget.attach(widget, place);
    const observer = new MutationObserver(() => {
      if (widget.node.querySelector('.lm-Widget, .jupyter-widgets-view, .jupyter-widgets')) {
        observer.disconnect();
        place.hidden = false;
        this.node.firstElementChild?.toggleAttribute('hidden', true);
      }
    });
    observer.observe(widget.node, { childList: true, subtree: true });
    signal.addEventListener('abort', () => observer.disconnect(), { once: true });
    const data = { [WIDGET_TYPE]: { model_id: shown.widget, version_major: 2, version_minor: 0 } };
    await widget.renderModel(new MimeModel({ data, trusted: true }));
  }

  /** The registry of this output's notebook, once its widget manager is there: it belongs to the kernel. */
  private async notebookRendermime(signal: AbortSignal): Promise<IRenderMimeRegistry | null> {
    const panel = await this.panelInTime(signal);
    if (!panel) {
      return null;
    }
    const own = panel.content.rendermime;
    const general = this.surroundings.rendermime;
    await panel.sessionContext.ready;
    while (!signal.aborted && own.getFactory(WIDGET_TYPE) === general.getFactory(WIDGET_TYPE)) {
      await new Promise(resolve => setTimeout(resolve, 200));
    }
    return signal.aborted ? null : own;
  }

  /** A cell may be drawn before it stands in its notebook: a page that is loaded puts its cells in when it has time. */
  private async panelInTime(signal: AbortSignal): Promise<NotebookPanel | null> {
    for (let waits = 0; waits < 300 && !this.panel() && this.surroundings.notebooks && !signal.aborted; waits++) {
      await new Promise(resolve => setTimeout(resolve, 200));
    }
    return this.panel();
  }

  private panel(): NotebookPanel | null {
    return this.surroundings.notebooks?.find(panel => panel.node.contains(this.node)) ?? null;
  }

  private readonly still = make('div.td-still.jp-RenderedHTMLCommon');
  private shown: Shown | null = null;
  private life: AbortController | null = null;
  private widget: IRenderMime.IRenderer | null = null;
}
