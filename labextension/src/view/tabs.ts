/** Tabs as WAI-ARIA's pattern has them: one stop of the Tab key, arrows, Home and End; a panel each. */
import { make, setAttribute, setText } from './dom';

let views = 0;

export class Tabs {
  readonly panels = new Map<string, HTMLElement>();
  private readonly buttons = new Map<string, HTMLButtonElement>();
  private chosen = '';

  /** `selected` is called with each tab that comes to the front, and with the one that leaves it ('' at first). */
  constructor(
    element: HTMLElement,
    label: string,
    names: readonly (readonly [string, string])[],
    private readonly selected: (tab: string, before: string) => void,
    signal: AbortSignal
  ) {
    const prefix = `td-${++views}`;
    const list = make('div.td-tabs', { role: 'tablist', 'aria-label': label });
    const panels = make('div.td-panels');
    for (const [tab, text] of names) {
      const ids = { tab: `${prefix}-tab-${tab}`, panel: `${prefix}-panel-${tab}` };
      const button = make(
        'button.td-tab',
        { type: 'button', role: 'tab', id: ids.tab, 'aria-controls': ids.panel, 'data-tab': tab },
        make('span.td-tab-label', {}, text),
        make('span.td-spoken'),
        make('span.td-tab-mark')
      );
      button.addEventListener('click', () => this.select(tab), { signal });
      // A panel scrolls; with nothing to focus in it (a table only), the keyboard could not scroll it.
      const panel = make('div.td-panel', {
        role: 'tabpanel',
        id: ids.panel,
        'aria-labelledby': ids.tab,
        tabindex: '0',
        hidden: true
      });
      panel.dataset.tab = tab;
      this.buttons.set(tab, button);
      this.panels.set(tab, panel);
      list.append(button);
      panels.append(panel);
    }
    list.addEventListener('keydown', event => this.key(event), { signal });
    element.append(list, panels);
  }

  get current(): string {
    return this.chosen;
  }

  select(tab: string): void {
    const before = this.chosen;
    if (tab === before || !this.panels.has(tab)) {
      return;
    }
    this.chosen = tab;
    for (const [name, button] of this.buttons) {
      setAttribute(button, 'aria-selected', String(name === tab));
      button.tabIndex = name === tab ? 0 : -1;
      this.panels.get(name)!.hidden = name !== tab;
    }
    this.selected(tab, before);
  }

  /** A few characters beside a tab's name, such as how many curves there are. */
  mark(tab: string, text: string): void {
    const [, between, mark] = this.buttons.get(tab)!.children;
    // Read aloud, label and mark would be one word: Curves10.
    setText(between!, text && ', ');
    setText(mark!, text);
  }

  private key(event: KeyboardEvent): void {
    const names = [...this.buttons.keys()];
    const at = names.indexOf(this.chosen);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[event.key];
    if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) {
      return;
    }
    const tab = names[(to + names.length) % names.length]!;
    this.select(tab);
    this.buttons.get(tab)!.focus();
    event.preventDefault();
    event.stopPropagation(); // the notebook's own keys (arrows move between cells) stay out of it
  }
}
