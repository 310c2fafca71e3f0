/** What stands above the lines: whose, which, what is searched for. */
import type { JobState } from '../protocol';
import { button, make, setAttribute, setText } from './dom';
import { RankBar } from './rankbar';
import { grouped } from './format';
import { plural, trans } from './translate';

/** Milliseconds after the last key before a search begins. */
const TYPING_MS = 50;

export interface LogChoice {
  stream: string | null;
  text: string;
  regex: boolean;
  case: boolean;
  /** Only lines that the search finds. */
  only: boolean;
  /** Lines that are alike on all ranks are shown once. */
  fold: boolean;
  /** A column for each rank. */
  beside: boolean;
}

export interface LogBarActions {
  filter(): void;
  search(): void;
  step(by: 1 | -1): void;
  follow(on: boolean): void;
  copy(): void;
  older(): void;
  download: (file: string) => void;
  /** From the search box back to the lines. */
  leave(): void;
}

type Toggle = 'regex' | 'case' | 'only' | 'fold' | 'beside';

export class LogBar {
  readonly element = make('div.td-logs-bar', { role: 'group', 'aria-label': trans('which lines are shown') });
  readonly choice: LogChoice = {
    stream: null,
    text: '',
    regex: false,
    case: false,
    only: false,
    fold: true,
    beside: false
  };

  private readonly rankBar: RankBar;
  private readonly box = make('input', { type: 'search', spellcheck: 'false', autocomplete: 'off' });
  private readonly hits = make('span.td-logs-said', { role: 'status' });
  private readonly said = make('span.td-logs-said', { role: 'status' });
  private readonly followButton: HTMLButtonElement;
  private readonly foldButton: HTMLButtonElement;
  private readonly besideButton: HTMLButtonElement;
  private readonly olderButton: HTMLButtonElement;
  private readonly files = make('select', { 'aria-label': trans('download a whole file'), hidden: '' });
  private drawnFiles = '';

  constructor(
    private readonly actions: LogBarActions,
    private readonly signal: AbortSignal
  ) {
    this.rankBar = new RankBar(() => actions.filter(), signal);
    this.followButton = this.button(trans('Follow'), trans('keep the newest line visible'), () =>
      actions.follow(this.followButton.getAttribute('aria-pressed') !== 'true')
    );
    this.foldButton = this.toggle('fold', trans('Fold alike'), trans('show lines that all ranks print only once'));
    this.besideButton = this.toggle('beside', trans('Side by side'), trans('a column of lines for each rank'));
    this.olderButton = this.button(trans('Older'), trans('load older lines'), () => actions.older());
    this.element.append(
      this.rankBar.element,
      this.streams(),
      this.searchGroup(),
      this.moreButton(),
      make(
        'span.td-logs-group.td-logs-seldom',
        {},
        this.followButton,
        this.foldButton,
        this.besideButton,
        this.olderButton,
        this.button(trans('Copy'), trans('copy the selected lines, or all that are shown'), () => actions.copy()),
        this.files
      ),
      this.said
    );
    this.files.addEventListener('change', () => this.download(), { signal });
  }

  /** Null: all. */
  get ranks(): ReadonlySet<number> | null {
    return this.rankBar.ranks;
  }

  /** The ranks and how they stand. */
  update(state: JobState): void {
    this.rankBar.update(state);
    this.foldButton.hidden = this.besideButton.hidden = state.world_size < 2;
  }

  /** How many ranks there is room for side by side. Whether other ones are shown then. */
  setRoom(count: number): boolean {
    return this.rankBar.setRoom(count);
  }

  /** Chooses one rank, or all. */
  pickRank(rank: number | null): void {
    this.rankBar.pick(rank);
  }

  focusSearch(): void {
    this.box.focus();
    this.box.select();
  }

  setFollow(on: boolean): void {
    setAttribute(this.followButton, 'aria-pressed', String(on));
  }

  setOlder(there: boolean, busy: boolean): void {
    this.olderButton.hidden = !there;
    this.olderButton.disabled = busy;
  }

  setFiles(names: readonly string[]): void {
    const drawn = names.join(' ');
    if (drawn !== this.drawnFiles) {
      this.drawnFiles = drawn;
      this.files.hidden = names.length === 0;
      const options = names.map(name => make('option', { value: name }, fileWords(name)));
      this.files.replaceChildren(make('option', { value: '' }, trans('Download…')), ...options);
    }
  }

  say(text: string): void {
    setText(this.said, text);
  }

  setHits(position: number, total: number, busy: boolean, more: boolean, error: string): void {
    setAttribute(this.box, 'aria-invalid', error !== '' && 'true');
    const count = `${grouped(total)}${more ? '+' : ''}`;
    const found =
      position > 0
        ? trans('%1 of %2, newest first', grouped(position), count)
        : plural('%2 hit', '%2 hits', total, count);
    const words = error || (this.choice.text ? found : '');
    setText(this.hits, busy && !error ? trans('%1, searching…', words) : words);
  }

  private streams(): HTMLElement {
    const options: [string, string][] = [
      ['', trans('out and err')],
      ['out', trans('out')],
      ['err', trans('err')]
    ];
    const list = make(
      'select',
      { 'aria-label': trans('stream') },
      ...options.map(([value, words]) => make('option', { value }, words))
    );
    const change = (): void => {
      this.choice.stream = list.value || null;
      this.actions.filter();
    };
    list.addEventListener('change', change, { signal: this.signal });
    return list;
  }

  private searchGroup(): HTMLElement {
    setAttribute(this.box, 'aria-label', trans('search the lines'));
    setAttribute(this.box, 'placeholder', trans('Search'));
    let timer: ReturnType<typeof setTimeout> | undefined;
    /** Whether something else is searched for: that goes to its first hit. */
    const search = (): boolean => {
      clearTimeout(timer);
      const other = this.choice.text !== this.box.value;
      if (other) {
        this.choice.text = this.box.value;
        this.actions.search();
      }
      return other;
    };
    const { signal } = this;
    signal.addEventListener('abort', () => clearTimeout(timer), { once: true });
    this.box.addEventListener('input', () => (timer = (clearTimeout(timer), setTimeout(search, TYPING_MS))), {
      signal
    });
    const keys = (event: KeyboardEvent): void => {
      if (event.key === 'Enter') {
        if (!search()) {
          this.actions.step(event.shiftKey ? -1 : 1);
        }
      } else if (event.key === 'Escape') {
        this.box.value = '';
        search();
        this.actions.leave();
      } else {
        return;
      }
      event.preventDefault();
      event.stopPropagation();
    };
    this.box.addEventListener('keydown', keys, { signal });
    return make(
      'span.td-logs-group',
      { role: 'group', 'aria-label': trans('search') },
      this.box,
      seldom(this.toggle('case', 'Aa', trans('match upper and lower case: Loss is not loss'))),
      seldom(this.toggle('regex', '.*', trans('search by a regular expression, such as loss: \\d+'))),
      seldom(this.toggle('only', trans('Only hits'), trans('show only lines that the search finds'))),
      this.button('↑', trans('older hit: Enter'), () => this.actions.step(1)),
      this.button('↓', trans('newer hit: Shift+Enter'), () => this.actions.step(-1)),
      this.hits
    );
  }

  /** Where there is little room it stands for what is seldom used; elsewhere it is not shown. */
  private moreButton(): HTMLButtonElement {
    const element = this.button('⋯', trans('more choices'), () => {
      const open = element.getAttribute('aria-expanded') !== 'true';
      setAttribute(element, 'aria-expanded', String(open));
      setAttribute(this.element, 'data-whole', open && 'true');
    });
    element.classList.add('td-logs-more');
    setAttribute(element, 'aria-expanded', 'false');
    return element;
  }

  private toggle(name: Toggle, words: string, label: string): HTMLButtonElement {
    const element = this.button(words, label, () => {
      this.choice[name] = !this.choice[name];
      setAttribute(element, 'aria-pressed', String(this.choice[name]));
      this.toggled(name);
    });
    setAttribute(element, 'aria-pressed', String(this.choice[name]));
    return element;
  }

  private toggled(name: Toggle): void {
    if (name === 'beside') {
      this.foldButton.disabled = this.choice.beside;
      this.rankBar.setBeside(this.choice.beside);
    } else if (name === 'fold') {
      this.actions.filter();
    } else {
      this.actions.search();
    }
  }

  private button(words: string, label: string, click: (event: MouseEvent) => void): HTMLButtonElement {
    // The visible word is part of the name: whoever speaks to the page says what stands there.
    const name = /\p{L}{3}/u.test(words) ? `${words}: ${label}` : label;
    return button('button', words, click, this.signal, { 'aria-label': name, title: label });
  }

  private download(): void {
    const name = this.files.value;
    this.files.value = '';
    if (name) {
      this.actions.download(name);
    }
  }
}

/** In a narrow view it is shown on request, and while it is pressed. */
function seldom(element: HTMLButtonElement): HTMLButtonElement {
  element.classList.add('td-logs-seldom');
  return element;
}

function fileWords(name: string): string {
  const [rank, stream] = name.split('.');
  return trans('rank %1, %2', rank, stream);
}
