/**
 * What stands for VS Code in the tests of the widget: a page with the widget manager of ipywidgets, a real kernel
 * behind a real server, messages of comms on the main shell (VS Code knows no subshells), and of each output the
 * widget, else the HTML, as VS Code chooses. A file that is offered is taken from a click that comes to the document's
 * body; a webview cannot download. `?colab` is a page whose messages have no buffers.
 */
import { shims, type DOMWidgetView, type IClassicComm } from '@jupyter-widgets/base';
import * as base from '@jupyter-widgets/base';
import { HTMLManager } from '@jupyter-widgets/html-manager';
import {
  CommsOverSubshells,
  type Kernel,
  KernelManager,
  type KernelMessage,
  ServerConnection
} from '@jupyterlab/services';

const WIDGET_TYPE = 'application/vnd.jupyter.widget-view+json';
const colab = new URLSearchParams(location.search).has('colab');

if (colab) {
  Object.assign(window, { google: { colab: {} } });
}

type Bundle = Record<string, unknown>;
type Factory = (dependency: unknown) => unknown;

const modules = new Map<string, Promise<unknown>>();

/** The AMD module at `url`, loaded once. Its only dependency is `@jupyter-widgets/base`. */
function amd(url: string): Promise<unknown> {
  const loaded = modules.get(url) ?? load(url);
  modules.set(url, loaded);
  return loaded;
}

async function load(url: string): Promise<unknown> {
  let module: unknown;
  (window as unknown as { define: unknown }).define = (_dependencies: string[], factory: Factory) => {
    module = factory(base);
  };
  const script = document.createElement('script');
  script.src = url;
  await new Promise((resolve, reject) => {
    script.onload = resolve;
    script.onerror = reject;
    document.head.append(script);
  });
  return module;
}

class Manager extends HTMLManager {
  /** All models whose comms were opened until now. */
  opened: Promise<unknown> = Promise.resolve();

  constructor(private readonly kernel: Kernel.IKernelConnection) {
    super({ loader: name => amd(`${name}.js`) });
    kernel.registerCommTarget(this.comm_target_name, (comm, message) => {
      const model = this.handle_comm_open(this.classic(comm), message);
      this.opened = Promise.all([this.opened, model]);
      return this.opened as Promise<void>;
    });
  }

  override async _create_comm(target: string, id: string): Promise<IClassicComm> {
    return this.classic(this.kernel.createComm(target, id));
  }

  private classic(comm: Kernel.IComm): IClassicComm {
    const classic = new shims.services.Comm(comm);
    if (colab) {
      const listen = classic.on_msg.bind(classic);
      classic.on_msg = callback => listen(message => callback({ ...message, buffers: [] }));
    }
    return classic;
  }
}

/** One output of a cell. An update that names the widget it shows already leaves its view alone. */
class Output {
  private bundle: Bundle = {};
  private model = '';
  private view: DOMWidgetView | null = null;

  constructor(
    private readonly element: HTMLElement,
    private readonly manager: Manager
  ) {}

  async show(bundle: Bundle): Promise<void> {
    this.bundle = bundle;
    const widget = bundle[WIDGET_TYPE] as { model_id: string } | undefined;
    if (widget && widget.model_id === this.model) {
      return;
    }
    this.view?.remove();
    this.view = null;
    this.model = widget?.model_id ?? '';
    if (!widget) {
      this.element.innerHTML = String(bundle['text/html'] ?? '');
      return;
    }
    this.element.replaceChildren();
    await this.manager.opened;
    this.view = await this.manager.create_view<DOMWidgetView>(await this.manager.get_model(this.model));
    await this.manager.display_view(this.view, this.element);
  }

  /** The view goes and comes anew, as when one scrolls away and back. */
  async again(): Promise<void> {
    this.view?.remove();
    this.model = '';
    await this.show(this.bundle);
  }
}

class Page {
  private readonly outputs = new Map<string, Output>();
  /** What was offered as a file, by its name. */
  readonly saved: Record<string, string> = {};

  private constructor(
    private readonly kernel: Kernel.IKernelConnection,
    private readonly manager: Manager
  ) {}

  static async open(): Promise<Page> {
    const token = new URLSearchParams(location.search).get('token') ?? '';
    const serverSettings = ServerConnection.makeSettings({ baseUrl: location.origin, token, appendToken: true });
    const kernel = await new KernelManager({ serverSettings }).startNew({ name: 'python3' });
    kernel.commsOverSubshells = CommsOverSubshells.Disabled;
    kernel.statusChanged.connect((_, status) => (document.body.dataset.kernel = status));
    const page = new Page(kernel, new Manager(kernel));
    document.body.addEventListener('click', event => page.save(event));
    return page;
  }

  private save(event: MouseEvent): void {
    const link = event.composedPath().find(node => node instanceof HTMLAnchorElement && node.href.startsWith('blob:'));
    if (link instanceof HTMLAnchorElement && event.view?.document) {
      event.preventDefault();
      const name = link.download;
      void fetch(link.href)
        .then(answer => answer.text())
        .then(text => (this.saved[name] = text));
    }
  }

  /** Begins a cell; its outputs come into an element of its own, which says when it has ended. */
  run(code: string): void {
    const cell = document.createElement('div');
    cell.className = 'cell';
    document.body.append(cell);
    const future = this.kernel.requestExecute({ code, allow_stdin: true });
    future.onIOPub = message => void this.take(cell, message);
    const ended = () => (cell.dataset.ended = 'true');
    void future.done.then(ended, ended); // a kernel that dies leaves its requests unanswered
  }

  async again(): Promise<void> {
    for (const output of this.outputs.values()) {
      await output.again();
    }
  }

  /** What `code` prints. */
  async value(code: string): Promise<string> {
    let printed = '';
    const future = this.kernel.requestExecute({ code });
    future.onIOPub = message => {
      const { text } = message.content as { text?: string };
      printed += text ?? '';
    };
    await future.done;
    return printed.trim();
  }

  private async take(cell: HTMLElement, message: KernelMessage.IIOPubMessage): Promise<void> {
    const content = message.content as { data?: Bundle; transient?: { display_id?: string }; text?: string };
    const id = content.transient?.display_id ?? '';
    const kind = message.header.msg_type;
    if (kind === 'stream') {
      cell.append(content.text ?? '');
    } else if (kind === 'display_data' || (kind === 'update_display_data' && this.outputs.has(id))) {
      const output = this.outputs.get(id) ?? this.add(cell, id);
      await output.show(content.data ?? {});
    }
  }

  private add(cell: HTMLElement, id: string): Output {
    const element = document.createElement('div');
    element.className = 'output';
    cell.append(element);
    const output = new Output(element, this.manager);
    this.outputs.set(id, output);
    return output;
  }
}

void Page.open().then(page => Object.assign(window, { notebook: page }));
