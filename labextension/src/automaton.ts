/**
 * A regular expression as an automaton: the time of a search grows with the length of the line and with nothing else,
 * whatever was typed (https://swtch.com/~rsc/regexp/regexp1.html). `(a|aa)+$` would keep JavaScript's own for years.
 */
import { Irregular, isWord, type Codes, type Edge, type Tree } from './expression';

type Step =
  | { is: 'one'; of: Codes; to: number }
  | { is: 'edge'; edge: Edge; to: number }
  | { is: 'fork'; to: number[] }
  | { is: 'end' };

/** An expression with more steps is left to others: each character of a line may cost a walk through all. */
const MOST_STEPS = 256;
/** States that are kept; beyond, they are found anew. */
const MOST_STATES = 1000;
const ASCII = 128;

/** What stands beside a place in the line. */
const NOTHING = 0;
const OTHER = 1;
const WORD = 2;

const kindOf = (code: number): number => (isWord(code) ? WORD : OTHER);

export class Program {
  readonly steps: Step[] = [{ is: 'end' }];
  readonly first: number;
  private parts = 0;

  /** Throws `Irregular` for a tree that is too large. */
  constructor(tree: Tree) {
    this.first = this.add(tree, 0);
  }

  /** The step with which `tree` begins, when `to` is what comes after it. */
  private add(tree: Tree, to: number): number {
    if (++this.parts > MOST_STEPS * 4) {
      throw new Irregular(); // `(?:){1000000000}` has no steps at all
    }
    switch (tree.is) {
      case 'one':
      case 'edge':
        return this.push({ ...tree, to });
      case 'all':
        return tree.parts.reduceRight((next, part) => this.add(part, next), to);
      case 'any':
        return this.push({ is: 'fork', to: tree.parts.map(part => this.add(part, to)) });
      case 'repeat':
        return this.repeat(tree, to);
    }
  }

  private repeat({ part, least, most }: Extract<Tree, { is: 'repeat' }>, to: number): number {
    let next = to;
    if (most === Infinity) {
      const fork = { is: 'fork' as const, to: [to] };
      next = this.push(fork);
      fork.to.push(this.add(part, next));
    } else {
      for (let count = least; count < most; count++) {
        next = this.push({ is: 'fork', to: [to, this.add(part, next)] });
      }
    }
    for (let count = 0; count < least; count++) {
      next = this.add(part, next);
    }
    return next;
  }

  private push(step: Step): number {
    if (this.steps.length >= MOST_STEPS) {
      throw new Irregular();
    }
    return this.steps.push(step) - 1;
  }
}

/** Where in the program a search may be, all at once, in front of a character. */
interface State {
  steps: number[];
  before: number;
  /** For each ASCII code what comes: twice the number of the next state, plus 1 for a match in front; -1: not known. */
  table: Int32Array;
  others: Map<number, number>;
  ends: boolean;
}

export class Automaton {
  private states: State[] = [];
  private numbers = new Map<string, number>();
  /** That in which most lines are begun. */
  private first: State | null = null;

  /** `anywhere`: a match may begin at each place, else at the first alone. */
  constructor(
    private readonly program: Program,
    private readonly anywhere: boolean
  ) {}

  /** Whether there is a match in `text`, from `from` on. */
  finds(text: string, from = 0): boolean {
    return this.run(text, from, true) >= 0;
  }

  /** Where the longest match from `from` on ends, or -1. */
  longest(text: string, from: number): number {
    return this.run(text, from, false);
  }

  private run(text: string, from: number, first: boolean): number {
    let state = this.start(text, from);
    let found = -1;
    for (let i = from; i < text.length; i++) {
      const code = text.charCodeAt(i);
      let next = code < ASCII ? state.table[code]! : (state.others.get(code) ?? -1);
      if (next < 0) {
        next = this.advance(state, code);
      }
      if (next & 1) {
        found = i;
        if (first) {
          return found;
        }
      }
      state = this.states[next >> 1]!;
      if (state.steps.length === 0) {
        return found;
      }
    }
    return state.ends ? text.length : found;
  }

  private start(text: string, from: number): State {
    if (from === 0 && this.first) {
      return this.first;
    }
    // A number first: where there were too many states, those of now are others.
    const number = this.number([this.program.first], from > 0 ? kindOf(text.charCodeAt(from - 1)) : NOTHING);
    const state = this.states[number]!;
    this.first = from === 0 ? state : this.first;
    return state;
  }

  private advance(state: State, code: number): number {
    const kind = kindOf(code);
    const { steps, matched } = this.reach(state.steps, state.before, kind);
    const next = new Set<number>(this.anywhere ? [this.program.first] : []);
    for (const step of steps) {
      if (step.of(code)) {
        next.add(step.to);
      }
    }
    const entry = this.number([...next], kind) * 2 + (matched ? 1 : 0);
    if (code < ASCII) {
      state.table[code] = entry;
    } else if (state.others.size < MOST_STATES) {
      state.others.set(code, entry);
    }
    return entry;
  }

  private number(steps: number[], before: number): number {
    const key = `${steps.sort((a, b) => a - b).join()};${before}`;
    const known = this.numbers.get(key);
    if (known !== undefined) {
      return known;
    }
    if (this.states.length >= MOST_STATES) {
      this.states = [];
      this.first = null;
      this.numbers.clear();
    }
    const ends = this.reach(steps, before, NOTHING).matched;
    this.numbers.set(key, this.states.length);
    const table = new Int32Array(ASCII).fill(-1);
    return this.states.push({ steps, before, table, others: new Map(), ends }) - 1;
  }

  /** What takes a character next, and whether the end is reached without one. */
  private reach(
    from: readonly number[],
    before: number,
    after: number
  ): { steps: Extract<Step, { is: 'one' }>[]; matched: boolean } {
    const steps: Extract<Step, { is: 'one' }>[] = [];
    const seen = new Set<number>(from);
    let matched = false;
    for (const number of seen) {
      const step = this.program.steps[number]!;
      switch (step.is) {
        case 'one':
          steps.push(step);
          break;
        case 'end':
          matched = true;
          break;
        case 'fork':
          step.to.forEach(to => seen.add(to));
          break;
        case 'edge':
          if (holds(step.edge, before, after)) {
            seen.add(step.to);
          }
      }
    }
    return { steps, matched };
  }
}

function holds(edge: Edge, before: number, after: number): boolean {
  switch (edge) {
    case 'start':
      return before === NOTHING;
    case 'end':
      return after === NOTHING;
    case 'word':
      return (before === WORD) !== (after === WORD);
    case 'inside':
      return (before === WORD) === (after === WORD);
  }
}
